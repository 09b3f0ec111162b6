// mla-run compare A B
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>

#include "apps/mla_run/commands.h"
#include "apps/mla_run/named_file.h"
#include "apps/mla_run/options.h"
#include "apps/mla_run/run_flow.h"
#include "lib/batch/output.h"
#include "lib/eval/compare.h"
#include "lib/report/report.h"

namespace mla {

namespace fs = std::filesystem;

Command add_compare(CLI::App& app) {
  struct Flags {
    std::string a, b, json = "compare.json", html;
    Thresholds thresholds;
  };
  auto flags = std::make_shared<Flags>();
  app.add_option("A", flags->a, "Folder of a finished run, or its outputs.jsonl")->required();
  app.add_option("B", flags->b, "The other run")->required();
  app.add_option("--json", flags->json, "Where to write the report as JSON")->capture_default_str();
  app.add_option("--html", flags->html, "Where to write the comparison as a page");
  add_threshold_options(app, flags->thresholds, "");
  return [flags] {
    check(flags->thresholds);
    std::vector<std::string> others;
    for (const std::string& run : {flags->a, flags->b}) {
      others.push_back(run);
      const fs::path folder = fs::is_directory(run) ? fs::path(run) : fs::path(run).parent_path();
      for (const char* name : {kOutputsName, kPartialName, kRunRecordName})
        others.push_back((folder / name).string());
    }
    check_named_files({{"--json", flags->json}, {"--html", flags->html}}, others);
    const CompareReport report = compare_runs(flags->a, flags->b);
    write_file_atomically(flags->json, to_json(report, flags->thresholds).dump(2) + "\n");
    if (!flags->html.empty())
      write_file_atomically(flags->html, report_html(report, flags->thresholds));
    fmt::print("{}", to_text(report, flags->thresholds));
    return failures(report, flags->thresholds).empty() ? kExitOk : kExitThreshold;
  };
}

}  // namespace mla
