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
      FUZZ_CHECK(record->logprobs.empty() || record->logprobs.size() == record->token_ids.size());
      FUZZ_CHECK(record->margins.size() == record->logprobs.size());
      for (const int32_t id : record->token_ids) FUZZ_CHECK(id >= 0);
      const OutputRecord again = reader.at(reader.place());
      FUZZ_CHECK(again.key == record->key && again.token_ids == record->token_ids);
    }
  });
  return 0;
}
