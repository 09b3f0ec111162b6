// outputs.jsonl of an earlier run, as compare and eval read it.
#include "lib/eval/run_reader.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace mla;
  static fuzz::MemoryFile file;
  file.set(fuzz::as_text(data, size));
  fuzz::parses([&] {
    RunReader reader(file.path());
    while (const auto record = reader.next()) {
      FUZZ_CHECK(!record->key.empty());
      FUZZ_CHECK(record->ok != record->choices.empty());
      const OutputRecord again = reader.at(reader.place());
      FUZZ_CHECK(again.key == record->key && again.choices.size() == record->choices.size());
      for (size_t i = 0; i < record->choices.size(); ++i) {
        const OutputChoice& choice = record->choices[i];
        FUZZ_CHECK(choice.logprobs.empty() || choice.logprobs.size() == choice.token_ids.size());
        FUZZ_CHECK(choice.margins.size() == choice.logprobs.size());
        for (const int32_t id : choice.token_ids) FUZZ_CHECK(id >= 0);
        FUZZ_CHECK(again.choices[i].token_ids == choice.token_ids);
      }
    }
  });
  return 0;
}
