// mla-run compare A B
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "apps/mla_run/commands.h"
#include "apps/mla_run/options.h"
#include "lib/batch/output.h"
#include "lib/eval/compare.h"
#include "lib/report/report.h"

namespace mla {

Command add_compare(CLI::App& app) {
  struct Flags {
    std::string a, b, json = "compare.json", html;
    double min_match = 1.0;
  };
  auto flags = std::make_shared<Flags>();
  app.add_option("A", flags->a, "Folder of a finished run, or its outputs.jsonl")->required();
  app.add_option("B", flags->b, "The other run")->required();
  app.add_option("--json", flags->json, "Where to write the report as JSON")->capture_default_str();
  app.add_option("--html", flags->html, "Where to write the comparison as a page");
  app.add_option("--min-match", flags->min_match,
                 "Exit 4 when a smaller share of tokens or logprob hashes is identical")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  return [flags] {
    const CompareReport report = compare_runs(flags->a, flags->b);
    write_file_atomically(flags->json, to_json(report, flags->min_match).dump(2) + "\n");
    if (!flags->html.empty())
      write_file_atomically(flags->html, report_html(report, flags->min_match));
    fmt::print("{}", to_text(report, flags->min_match));
    return passes(report, flags->min_match) ? kExitOk : kExitThreshold;
  };
}

}  // namespace mla
