#include "kernels/cuda/upload_pool.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "kernels/cuda/check.h"
#include "kernels/cuda/staging.h"

namespace mla::cuda {
namespace {

constexpr size_t kStagingBytes = size_t{16} << 20;  // of a thread
constexpr size_t kSliceBytes = size_t{2} << 20;     // of a source that is converted, at a time

// Rows [first, first + rows) of the source as bf16 without gaps.
void to_bf16_rows(const HostTensor& source, int64_t first, int64_t rows, bf16* out) {
  for (int64_t r = first; r < first + rows; ++r)
    for (int64_t c = 0; c < source.cols; ++c) {
      const int64_t i = r * source.row_stride + c;
      const auto* bytes = static_cast<const std::byte*>(source.data) +
                          i * static_cast<int64_t>(size_of(source.dtype));
      float value;
      if (source.dtype == DType::f32) {  // files give no alignment
        std::memcpy(&value, bytes, sizeof value);
      } else {
        uint16_t bits;
        std::memcpy(&bits, bytes, sizeof bits);
        value = f16_to_f32(bits);
      }
      *out++ = to_bf16(value);
    }
}

// A slice is whole groups of the placement, or whole rows where it is one group.
void copy_converted(Staging& staging, const Placement& to, const HostTensor& source) {
  const bool grouped = to.groups > 1;
  const size_t row = static_cast<size_t>(source.cols) * 2;
  const int64_t unit = grouped ? to.rows : 1;
  const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(kSliceBytes / row) / unit) * unit;
  std::vector<bf16> rows(static_cast<size_t>(std::min(step, source.rows) * source.cols));
  const size_t group = row * static_cast<size_t>(unit);
  const size_t pitch = grouped ? row * static_cast<size_t>(to.pitch) : group;
  for (int64_t first = 0; first < source.rows; first += step) {
    const int64_t count = std::min(step, source.rows - first);
    to_bf16_rows(source, first, count, rows.data());
    std::byte* at = static_cast<std::byte*>(to.to) + static_cast<size_t>(first / unit) * pitch;
    if (grouped) {
      staging.upload_2d(at, pitch, rows.data(), group, group, static_cast<size_t>(count / unit));
    } else {
      staging.upload(at, rows.data(), static_cast<size_t>(count) * row);
    }
  }
}

void copy(Staging& staging, const Placement& to, const HostTensor& source) {
  const size_t row = static_cast<size_t>(source.cols) * 2;
  const size_t group = row * static_cast<size_t>(to.rows);
  const size_t pitch = row * static_cast<size_t>(to.pitch);
  const auto groups = static_cast<size_t>(to.groups);
  if (source.dtype != DType::bf16) {
    copy_converted(staging, to, source);
  } else if (source.row_stride == source.cols) {
    if (groups == 1) {
      staging.upload(to.to, source.data, group);
    } else {
      staging.upload_2d(to.to, pitch, source.data, group, group, groups);
    }
  } else {
    if (to.groups != 1) fail("a gate_up weight cannot be a part of another's columns");
    staging.upload_2d(to.to, row, source.data, static_cast<size_t>(source.row_stride) * 2, row,
                      static_cast<size_t>(source.rows));
  }
}

}  // namespace

UploadPool::UploadPool(int device, int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this, device] { work(device); });
}

UploadPool::~UploadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    tasks_.clear();  // their sources may be gone where loading has failed
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void UploadPool::add(const Placement& to, const HostTensor& source) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back({to, source});
  }
  changed_.notify_one();
}

void UploadPool::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return tasks_.empty() && busy_ == 0; });
  if (!error_) return;
  const std::exception_ptr error = std::exchange(error_, nullptr);
  std::rethrow_exception(error);
}

// A thread counts as busy from its first copy until its stream has been waited for.
void UploadPool::work(int device) {
  cudaStream_t stream = nullptr;
  std::unique_ptr<Staging> staging;
  bool copying = false;
  std::unique_lock lock(mutex_);
  const auto unlocked = [&](auto&& work) {
    lock.unlock();
    std::exception_ptr error;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !error_) error_ = error;
  };
  for (;;) {
    if (!tasks_.empty()) {
      const Task task = tasks_.front();
      tasks_.pop_front();
      busy_ += copying ? 0 : 1;
      copying = true;
      unlocked([&] {
        if (!staging) {
          MLA_CUDA_CHECK(cudaSetDevice(device));
          MLA_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
          staging = std::make_unique<Staging>(stream, kStagingBytes);
        }
        copy(*staging, task.to, task.source);
      });
    } else if (copying) {
      unlocked([&] {
        if (stream) MLA_CUDA_CHECK(cudaStreamSynchronize(stream));
      });
      copying = false;
      if (--busy_ == 0 && tasks_.empty()) changed_.notify_all();
    } else if (stop_) {
      break;
    } else {
      changed_.wait(lock);
    }
  }
  lock.unlock();
  staging.reset();
  if (stream) cudaStreamDestroy(stream);
}

}  // namespace mla::cuda
