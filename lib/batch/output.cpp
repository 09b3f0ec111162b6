#include "lib/batch/output.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "lib/base/error.h"

namespace mla {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void system_fail(const std::string& path, const char* what, int code) {
  fail("{}: {}: {}", path, what, std::strerror(code));
}

// A descriptor that closes itself.
class File {
 public:
  File(const std::string& path, int flags) : path_(path), fd_(::open(path.c_str(), flags, 0666)) {
    if (fd_ < 0) system_fail(path_, "cannot be opened", errno);
  }
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  std::string path_;
  int fd_;
};

// A regular file takes it in one write(2); what a pipe or a signal leaves over follows.
void write_all(int fd, std::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) system_fail(path, "cannot be written", errno);
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

void read_exactly(int fd, char* data, size_t bytes, int64_t offset, const std::string& path) {
  while (bytes > 0) {
    const ssize_t n = ::pread(fd, data, bytes, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) system_fail(path, "cannot be read", errno);
    if (n == 0) fail("{}: expected {} more bytes at {}, found the end", path, bytes, offset);
    data += n;
    bytes -= static_cast<size_t>(n);
    offset += n;
  }
}

// Some file systems do not sync (EINVAL, on a folder or a pipe); that is not an error.
void sync_fd(int fd, const std::string& path) {
  if (::fsync(fd) != 0 && errno != EINVAL && errno != EROFS)
    system_fail(path, "cannot be synced", errno);
}

void rename_into_place(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    system_fail(to, "cannot be renamed into place", errno);
  const std::string parent = fs::path(to).parent_path().string();
  const File folder(parent.empty() ? "." : parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  sync_fd(folder.fd(), parent);
}

// PATH.tmp is written and renamed to PATH; where that fails it goes away, for the disk may be full.
template <class Write>
void replace_file(const std::string& path, const Write& write) {
  const std::string temporary = path + ".tmp";
  const File out(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC);
  try {
    write(out.fd(), temporary);
    sync_fd(out.fd(), temporary);
    rename_into_place(temporary, path);
  } catch (const Error&) {
    ::unlink(temporary.c_str());
    throw;
  }
}

void check_folder(const OutputOptions& options) {
  const auto in_dir = [&](const char* name) { return options.dir + "/" + name; };
  if (!options.input_path.empty() && options.input_path != "-") {
    for (const char* name : {kOutputsName, kPartialName, kRunRecordName}) {
      if (same_file(options.input_path, in_dir(name))) {
        usage_fail(
            "{}: the input is one of the files to be written to {}; expected another "
            "output folder",
            options.input_path, options.dir);
      }
    }
  }
  if (options.overwrite || options.earlier) return;
  for (const char* name : {kOutputsName, kPartialName}) {
    if (::access(in_dir(name).c_str(), F_OK) == 0) {
      usage_fail("{}: exists already{}; expected another output folder, --resume or --overwrite",
                 in_dir(name), name == kPartialName ? ", of a run that did not finish" : "");
    }
  }
}

}  // namespace

OutputWriter::OutputWriter(const OutputOptions& options)
    : dir_(options.dir), path_(options.dir + "/" + kPartialName), owned_(true) {
  if (dir_.empty()) usage_fail("output folder: expected a path, found \"\"");
  check_folder(options);
  std::error_code error;
  fs::create_directories(dir_, error);
  if (error) fail("{}: cannot be made: {}", dir_, error.message());
  const int fresh = options.overwrite || options.earlier ? 0 : O_EXCL;
  File file(path_, O_RDWR | O_CREAT | O_CLOEXEC | fresh);
  if (::flock(file.fd(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    fail("{}: another run is writing to it", path_);
  if (options.earlier) {
    fd_ = file.release();
    go_on(*options.earlier);
    return;
  }
  if (::ftruncate(file.fd(), 0) != 0) system_fail(path_, "cannot be emptied", errno);
  const std::string outputs = dir_ + "/" + kOutputsName;
  if (options.overwrite && ::unlink(outputs.c_str()) != 0 && errno != ENOENT)
    system_fail(outputs, "cannot be removed", errno);
  const std::string record = dir_ + "/" + kRunRecordName;
  if (options.overwrite && ::unlink(record.c_str()) != 0 && errno != ENOENT)
    system_fail(record, "cannot be removed", errno);
  fd_ = file.release();
}

// Only appends: whenever this is ended too, what was finished is still there to be read.
void OutputWriter::go_on(const EarlierOutput& earlier) {
  struct stat status {};
  if (::fstat(fd_, &status) != 0) system_fail(path_, "cannot be looked at", errno);
  if (status.st_size != earlier.partial_size)
    fail("{}: expected {} bytes, found {}: another run wrote to it", path_, earlier.partial_size,
         static_cast<int64_t>(status.st_size));
  if (::ftruncate(fd_, earlier.partial_bytes) != 0 ||
      ::lseek(fd_, earlier.partial_bytes, SEEK_SET) < 0)
    system_fail(path_, "its torn last line cannot be removed", errno);
  places_ = earlier.partial;
  end_ = earlier.partial_bytes;
  if (earlier.outputs.empty()) return;
  const std::string outputs = dir_ + "/" + kOutputsName;
  const File in(outputs, O_RDONLY | O_CLOEXEC);
  std::string line;
  for (const RecordPlace& place : earlier.outputs) {
    line.resize(static_cast<size_t>(place.bytes));
    read_exactly(in.fd(), line.data(), line.size(), place.offset, outputs);
    write_line(place.index, line);
  }
}

OutputWriter OutputWriter::to_descriptor(int fd, std::string name) {
  OutputWriter writer;
  writer.fd_ = fd;
  writer.path_ = std::move(name);
  return writer;
}

OutputWriter::OutputWriter(OutputWriter&& other) noexcept
    : dir_(std::move(other.dir_)),
      path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      owned_(other.owned_),
      end_(other.end_),
      places_(std::move(other.places_)) {}

OutputWriter::~OutputWriter() {
  if (owned_ && fd_ >= 0) ::close(fd_);
}

void OutputWriter::write(int64_t index, const OrderedJson& record) {
  write_line(index, dump_line(record) + "\n");
}

void OutputWriter::write_line(int64_t index, std::string_view line) {
  if (fd_ < 0) fail("{}: a record after the end", path_);
  try {
    write_all(fd_, line, path_);
  } catch (const Error&) {
    // The part of a line that a full disk took goes away again, so that whole lines remain.
    if (owned_ && ::ftruncate(fd_, end_) == 0) ::lseek(fd_, end_, SEEK_SET);
    throw;
  }
  const auto bytes = static_cast<int64_t>(line.size());
  places_.push_back({.index = index, .offset = end_, .bytes = bytes});
  end_ += bytes;
}

void OutputWriter::copy_sorted(int out, const std::string& out_path) {
  constexpr size_t kBlock = size_t{1} << 20;
  std::string block, line;
  for (const RecordPlace& place : places_) {
    line.resize(static_cast<size_t>(place.bytes));
    read_exactly(fd_, line.data(), line.size(), place.offset, path_);
    block += line;
    if (block.size() < kBlock) continue;
    write_all(out, block, out_path);
    block.clear();
  }
  write_all(out, block, out_path);
}

void OutputWriter::finish() {
  if (fd_ < 0) fail("{}: finished twice", path_);
  std::sort(places_.begin(), places_.end(),
            [](const RecordPlace& a, const RecordPlace& b) { return a.index < b.index; });
  const auto twice = std::adjacent_find(
      places_.begin(), places_.end(),
      [](const RecordPlace& a, const RecordPlace& b) { return a.index == b.index; });
  if (twice != places_.end()) fail("{}: two records with index {}", path_, twice->index);
  if (!owned_) {
    fd_ = -1;
    return;
  }
  const std::string outputs = dir_ + "/" + kOutputsName;
  replace_file(outputs, [&](int out, const std::string& path) { copy_sorted(out, path); });
  if (::unlink(path_.c_str()) != 0) system_fail(path_, "cannot be removed", errno);
  ::close(std::exchange(fd_, -1));
}

void OutputWriter::discard() {
  if (owned_ && fd_ >= 0 && ::unlink(path_.c_str()) != 0)
    system_fail(path_, "cannot be removed", errno);
}

bool same_file(const std::string& a, const std::string& b) {
  struct stat x {
  }, y{};
  if (::stat(a.c_str(), &x) == 0 && ::stat(b.c_str(), &y) == 0)
    return x.st_dev == y.st_dev && x.st_ino == y.st_ino;
  std::error_code error;
  const auto whole = [&](const std::string& name) {
    return error ? fs::path{} : fs::weakly_canonical(fs::absolute(name, error), error);
  };
  const fs::path one = whole(a), other = whole(b);
  return !error && one == other;
}

namespace {

// Of a link, what it names in the end, which need not be there.
std::string behind_links(const std::string& path) {
  fs::path at = path;
  std::error_code ignored;
  for (int i = 0; i < 40 && fs::is_symlink(at, ignored); ++i)
    at = at.parent_path() / fs::read_symlink(at, ignored);
  return at.string();
}

// The file of standard output or error where that is what `info` is of, else -1.
int standard_stream(const struct stat& info) {
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat of {};
    if (::fstat(fd, &of) == 0 && of.st_dev == info.st_dev && of.st_ino == info.st_ino) return fd;
  }
  return -1;
}

}  // namespace

void write_file_atomically(const std::string& path, std::string_view text) {
  struct stat info {};
  const bool is_there = ::stat(path.c_str(), &info) == 0;
  if (const int fd = is_there ? standard_stream(info) : -1; fd >= 0) {
    std::fflush(nullptr);
    return write_all(fd, text, path);
  }
  if (is_there && !S_ISREG(info.st_mode)) {  // a device or a pipe stays one
    const File out(path, O_WRONLY | O_CLOEXEC);
    return write_all(out.fd(), text, path);
  }
  replace_file(behind_links(path),
               [&](int out, const std::string& name) { write_all(out, text, name); });
}

std::string dump_line(const OrderedJson& value) {
  try {
    return value.dump();
  } catch (const OrderedJson::exception& e) {
    fail("a record is not UTF-8: {}", e.what());
  }
}

}  // namespace mla
