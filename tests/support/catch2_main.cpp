// The main function of the tests. Its exit code: 0; 1 where a test failed; kAllSkipped, which ctest
// knows, where none failed and each that ran was skipped.
#define CATCH_CONFIG_RUNNER  // for Catch2 2
#include "tests/support/catch.h"

namespace mla::test {
namespace {

constexpr int kAllSkipped = 77;  // SKIP_RETURN_CODE in tests/CMakeLists.txt

int cases = 0, skipped = 0;

#if CATCH_VERSION_MAJOR == 2
using ListenerBase = Catch::TestEventListenerBase;
#else
using ListenerBase = Catch::EventListenerBase;
#endif

class CountSkips : public ListenerBase {
 public:
  using ListenerBase::ListenerBase;
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    ListenerBase::testCaseEnded(stats);
    ++cases;
    skipped += case_skipped;
    case_skipped = false;
  }
};

CATCH_REGISTER_LISTENER(CountSkips)

int run(int argc, char** argv) {
  const int result = Catch::Session().run(argc, argv);
  if (cases == 0) return result;  // a list, help, or a mistake in the arguments
  if (result != 0) return 1;      // Catch2's number of failures may be any
  return skipped == cases ? kAllSkipped : 0;
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) { return mla::test::run(argc, argv); }
