#include "apps/mla_run/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "apps/mla_run/options.h"

namespace mla {
namespace {

constexpr auto kLineEvery = std::chrono::seconds(5);
constexpr auto kRedrawEvery = std::chrono::milliseconds(100);
constexpr double kUnknown = -1;
constexpr int kBarWidth = 20;

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value && *value;
}

bool is_dumb() {
  const char* term = std::getenv("TERM");
  return !term || std::string_view(term) == "dumb";
}

size_t terminal_columns() {
  struct winsize size {};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string clock_text(double seconds) {
  const auto s = static_cast<int64_t>(std::min(seconds, 3.6e6) + 0.5);
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

std::string eta_text(double share, double seconds) {
  if (!(share > 0) || seconds <= 0 || share >= 1) return "";
  return "ETA " + clock_text(seconds * (1 - share) / share);
}

}  // namespace

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Progress::Progress(const std::string& mode, bool quiet)
    : on_(mode == "always" || (mode == "auto" && !quiet)),
      bar_(isatty(STDERR_FILENO) == 1 && !is_dumb()),
      colour_(bar_ && !is_set("NO_COLOR")) {}

void Progress::begin() {
  clear();
  start_ = Clock::now();
  shown_ = {};
}

void Progress::checking(const std::string& what) {
  begin();
  show(kUnknown, "checking " + what);
}

void Progress::loading(uint64_t total_bytes) {
  begin();
  total_bytes_ = total_bytes;
  loaded(0);
}

void Progress::loaded(uint64_t bytes) {
  const double seconds = seconds_since(start_);
  const double share =
      total_bytes_ > 0 ? static_cast<double>(bytes) / static_cast<double>(total_bytes_) : 0;
  show(share, fmt::format("loading: {} of {} bytes, {:.2f} GB/s", bytes, total_bytes_,
                          static_cast<double>(bytes) / std::max(seconds, 1e-9) / 1e9));
}

void Progress::running(const std::string& label, int64_t total, int64_t kept) {
  begin();
  label_ = label;
  total_ = total;
  kept_ = kept;
  last_ = {};
  update(last_);
}

std::string Progress::running_text() const {
  const double seconds = std::max(seconds_since(start_), 1e-9);
  std::string of = total_ >= 0 ? fmt::format("{} requests", total_)
                               : fmt::format("{} requests read", last_.read);
  if (kept_ > 0) of += fmt::format(" ({} more were finished)", kept_);
  return fmt::format("{}: {} of {}, {} failed, {:.0f} prefill tokens/s, {:.1f} decode tokens/s",
                     label_, last_.done, of, last_.failed,
                     static_cast<double>(last_.prefill_tokens) / seconds,
                     static_cast<double>(last_.decode_tokens) / seconds);
}

void Progress::update(const BatchProgress& progress) {
  last_ = progress;
  if (!on_ || Clock::now() - shown_ < kRedrawEvery) return;
  const double share =
      total_ > 0 ? static_cast<double>(last_.done) / static_cast<double>(total_) : kUnknown;
  show(share, running_text());
}

void Progress::finish() {
  clear();
  if (on_) say("{}\n", running_text());
}

void Progress::clear() {
  if (drawn_) say("\r\033[K");
  drawn_ = false;
}

void Progress::show(double share, const std::string& text) {
  const auto now = Clock::now();
  if (!on_ || now - shown_ < (bar_ ? Clock::duration(kRedrawEvery) : Clock::duration(kLineEvery)))
    return;
  shown_ = now;
  const std::string eta = eta_text(share, seconds_since(start_));
  if (bar_) {
    draw(share, eta, text);
  } else {
    say("{}{}{}\n", text, eta.empty() ? "" : ", ", eta);
  }
}

// On one line of the terminal: what is wider would not be drawn over.
void Progress::draw(double share, const std::string& eta, const std::string& text) {
  std::string bar;
  if (share >= 0) {
    const int filled = static_cast<int>(std::min(share, 1.0) * kBarWidth);
    bar = fmt::format("[{:<{}}] {:3.0f}% {}{}", std::string(static_cast<size_t>(filled), '#'),
                      kBarWidth, 100 * std::min(share, 1.0), eta, eta.empty() ? "" : " ");
  }
  const size_t columns = terminal_columns() - 1;
  const std::string rest = bar.size() < columns ? text.substr(0, columns - bar.size()) : "";
  bar.resize(std::min(bar.size(), columns));
  const bool colour = colour_ && !bar.empty();
  say("\r\033[K{}{}{}{}", colour ? "\033[36m" : "", bar, colour ? "\033[0m" : "", rest);
  drawn_ = true;
}

}  // namespace mla
