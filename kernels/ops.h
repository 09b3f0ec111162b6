// The op interface: everything the model asks of a device. Few ops, coarse enough to be fused.
//
// Symbols: T rows of the call, D decode rows of the step, H hidden, N heads, P nope dim, R rope
// dim, V value dim, L latent dim, E routed experts, K routed experts a token, I expert width, W
// workspace rows. S is the number of shared experts, but in SampleParams that of sampled rows. `run
// dtype` is the element type of activations and cache, bfloat16 or float32. Pointers are device
// pointers of the backend, row-major, and rows are contiguous unless a stride (in elements) is
// given.
//
// Every op computes each row by itself: the bits of a row's result do not depend on T, on the other
// rows, on how a step is cut into passes, nor on the number of threads. Sums of products run in
// order with fp32 accumulation. Rounding to the run dtype happens where an `out` is written, and
// where a comment says so; nowhere else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "lib/base/dtype.h"
#include "lib/base/step_types.h"

namespace mla {

// How a weight is used. A backend lays it out as it likes (panels, interleaved rows, copies).
enum class MatrixKind : uint8_t {
  linear,   // y = x·Wᵀ
  gate_up,  // rows [0, rows/2) gate, [rows/2, rows) up; the op computes SiLU(x·gateᵀ)·(x·upᵀ)
  kv_b,     // [N·(P+V), L], per head k_nope rows first; read by rows and, absorbed, by heads
  embedding,  // rows are looked up
};

// A weight that the backend owns: `experts` matrices [rows, cols]. Plain data, cheap to copy.
struct Matrix {
  MatrixKind kind = MatrixKind::linear;
  DType dtype = DType::bf16;  // as stored; bf16 weights stay bf16 in a float32 run (it is exact)
  int64_t experts = 1;
  int64_t rows = 0;
  int64_t cols = 0;
  int32_t heads = 0;     // of kv_b
  int32_t nope_dim = 0;  // of kv_b
  void* data = nullptr;
  void* absorbed = nullptr;  // kv_b: the backend's form for the absorbed path
};

// Host memory with a piece of a weight, [rows, cols].
struct HostTensor {
  const void* data = nullptr;
  DType dtype = DType::bf16;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // in elements
};

// A piece [rows, cols] of a tensor of random values, from its row first_row and column first_col
// on. An element is a function of the seed and its place in the whole tensor, so that pieces of it
// fit together: normally distributed, mean 0.
struct NormalTensor {
  uint64_t seed = 0;
  float deviation = 1.0f;
  int64_t first_row = 0, first_col = 0;
  int64_t rows = 0, cols = 0;
  int64_t row_stride = 0;  // columns of the whole tensor
};

struct EmbedParams {
  const int32_t* ids;      // [T]; id < 0: the token sampled[-1 - id], which is not read back yet
  const int32_t* sampled;  // device token slots, see SampleParams; may be null without such ids
  Matrix table;            // [vocab, H]
  void* out;               // [T, H]
  int64_t T;
};

// residual += delta (fp32, one rounding); out = RMSNorm(residual)·weight.
struct AddNormParams {
  void* residual;                       // [T, H], updated in place; with `rows` it is only read
  const float* delta;                   // [T, H] fp32, or null: nothing is added
  const void* delta_rounded = nullptr;  // [T, H] instead, in the run dtype
  const float* weight;                  // [H]
  const int32_t* rows;                  // [T] or null: row t reads residual and delta row rows[t]
  void* out;                            // [T, H]
  int64_t T, H;
  float eps;
};

// out = RMSNorm(x)·weight
struct NormParams {
  const void* x;  // [T, dim], rows x_stride apart
  int64_t x_stride;
  const float* weight;  // [dim]
  void* out;            // [T, dim]
  int64_t T, dim;
  float eps;
};

// out = x·Wᵀ
struct LinearParams {
  const void* x;  // [T, cols]
  Matrix w;       // [rows, cols]
  void* out;      // [T, rows], run dtype, or float when out_f32
  bool out_f32;
  int64_t T;
};

// out = SiLU(x·gateᵀ)·(x·upᵀ); gate and up stay fp32 until the one rounding of the product.
struct GatedLinearParams {
  const void* x;  // [T, cols]
  Matrix w;       // gate_up [2·I, cols]
  void* out;      // [T, I]
  int64_t T;
};

// Rotates q_pe in place and writes the cache rows: RMSNorm(latent)·weight, then rotated k_pe.
struct RopeCacheParams {
  void* q;  // [T, N·(P+R)], rows q_stride apart
  int64_t q_stride;
  const void* kv_a;  // [T, L+R], rows kv_stride apart: latent, k_pe
  int64_t kv_stride;
  const float* norm_weight;  // [L]
  const float* rope_table;   // [max_model_len, R]: cos of the R/2 pairs (2i, 2i+1), then sin
  const int32_t* positions;  // [T]; -1: a padding row, of which nothing is needed
  const int64_t* slots;      // [T]; -1: the row writes no cache
  void* cache;               // [slots, L+R] of this layer
  int64_t T;
  int32_t N, P, R, L;
  float eps;
};

// K_nope|V of the cached rows of one pass: workspace row w = latent(row)·kv_bᵀ.
struct KvUpParams {
  const void* cache;  // [slots, L+R]
  const int32_t* page_table;
  const PrefillSpan* prefill;
  const KeySpan* spans;  // [num_spans] of the pass
  int32_t num_spans;
  const WorkTile* tiles;  // [num_tiles] key tiles of the pass: every key once
  int32_t num_tiles;
  Matrix kv_b;      // [N·(P+V), L]
  void* workspace;  // [W + kKeyTile rows, N·(P+V)]: the rows past W are not written
  int32_t L, R;
};

// Causal attention of prompt rows to the keys of one pass. Keys are taken in tiles of kKeyTile at
// absolute positions. A request whose keys span several passes carries its state in fp32; the pass
// that holds position 0 starts it, the one that holds the last key normalises and writes `out`.
struct MlaPrefillParams {
  const void* q;  // [T, N·(P+R)], rows q_stride apart
  int64_t q_stride;
  const void* workspace;  // [W + kKeyTile rows, N·(P+V)]: a key tile may be read whole; what is in
                          // rows of no key, NaN too, does not matter
  const void* cache;      // [slots, L+R], for k_pe
  const int32_t* page_table;
  const PrefillSpan* prefill;
  const KeySpan* spans;  // [num_spans] of the pass
  int32_t num_spans;
  const WorkTile* tiles;  // [num_tiles] query tiles of the pass: every new token once
  int32_t num_tiles;
  float* state_max;  // [T, N] row max of scores, in whatever unit the backend likes
  float* state_sum;  // [T, N] row sum
  float* state_out;  // [T, N, V] unnormalised
  void* out;         // [T, N·V]
  int32_t N, P, R, L, V;
  float scale;  // softmax scale, m² included; natural log base
};

// Absorbed attention of generated rows, keys in splits of kDecodeSplit at absolute positions, each
// starting fresh. The splits of a group are combined as a left fold in order, and so are the
// groups.
struct MlaDecodeParams {
  const void* q;  // [D, N·(P+R)], rows q_stride apart: the decode rows of the step
  int64_t q_stride;
  const void* cache;  // [slots, L+R]
  const int32_t* page_table;
  const DecodeRow* rows;  // [D]
  int32_t D;
  const DecodeSplit* splits;  // [num_splits[0]] the work of all rows, a row's splits in order
  const DecodeSplit* groups;  // [num_splits[1]] the same work by groups
  const int32_t* num_splits;  // [2] device memory
  Matrix kv_b;
  void* q_lat;  // [D, N, L] scratch, run dtype: rounded here
  void* o_lat;  // [D, N, L] scratch, run dtype: rounded here
  void* out;    // [D, N·V]
  int32_t N, P, R, L, V;
  float scale;
};

// Router: fp32 logits, softmax, top-K; ties to the lower index; distinct ids even for NaN.
struct RouterParams {
  const void* x;             // [T, H]
  Matrix gate;               // [E, H]
  const int32_t* positions;  // [T] or null: a row at -1 is padding and goes to no expert
  float* logits;             // [T, E] scratch
  int32_t* ids;              // [T, K] in order of rank; -1 of padding
  float* weights;            // [T, K] softmax score × scaling_factor
  int64_t T;
  int32_t E, K;
  int32_t groups, kept_groups;  // group_limited_greedy; groups = 1: plain greedy
  float scaling_factor;
};

// Expert outputs by slot: slot k < K is routed expert ids[t, k], slot K + s is shared expert s
// (matrix E + s). Shared experts are S experts of width I, summed in order.
struct ExpertsParams {
  const void* x;       // [T, H]
  const int32_t* ids;  // [T, K]; -1: that slot's output is not needed
  Matrix gate_up;      // experts = E + S of [2·I, H]
  Matrix down;         // experts = E + S of [H, I]
  void* inner;         // [T·(K+S), I] scratch, run dtype: rounded here
  void* out;           // [T, K+S, H]
  int64_t T;
  int32_t E, K, S;
};

// residual = (sum over routed slots of weight·out, in order of rank, + shared) + residual, one
// rounding.
struct CombineParams {
  const void* expert_out;  // [T, K+S, H]
  const float* weights;    // [T, K]
  void* residual;          // [T, H]; not looked at with `sum`
  void* sum = nullptr;     // [T, H]: the sum alone is rounded to here
  int64_t T, H;
  int32_t K, S;
};

// Rows that are there in pieces of columns, put together: out[r][c] = parts[c / width][r][c %
// width].
struct JoinColumnsParams {
  const float* parts;  // [ceil(cols / width), rows, width]
  float* out;          // [rows, cols]
  int64_t rows, width, cols;
};

// A token of a row whose logit is changed before sampling: see edited_logit of kernels/sampling.h.
struct LogitEdit {
  int32_t token;  // distinct within a row
  int32_t count;  // how often it was generated; 0: it is in the prompt alone, -1: in neither
  float bias;     // -infinity: it is not sampled
  float raw;      // the op keeps the logit as it was here
};

// How one row is sampled. temperature 0 is greedy.
struct SampleSpec {
  float temperature = 0.0f;
  float top_p = 1.0f;  // (0, 1]
  int32_t top_k = 0;   // 0: all
  // Tokens whose (logit - best logit) / temperature is below are not drawn: log(min_p).
  float min_scaled = -std::numeric_limits<float>::infinity();
  uint32_t choice = 0;    // of the request (n > 1)
  uint32_t position = 0;  // of the sampled token
  uint64_t seed = 0;
  int32_t num_top = 0;  // top logprobs wanted, <= SampleParams::max_top
  float repetition_penalty = 1.0f, frequency_penalty = 0.0f, presence_penalty = 0.0f;
  int32_t edit_begin = 0;  // edits[edit_begin, edit_end) are of this row
  int32_t edit_end = 0;
  int32_t token_slot = -1;  // where the token stays on the device for the next step; -1: nowhere
};

// The next token of each row: argmax, or Gumbel-max over the kept set with a counter-based
// generator keyed by (seed, choice, position, token id). The order is vLLM's: edits, temperature,
// min_p, top-k, top-p; ties to the lower id. Log-probabilities are log-softmax of the raw logits,
// as they are before the edits.
struct SampleParams {
  float* logits;            // [S, vocab]; the edits are made in place
  const SampleSpec* specs;  // [S]
  LogitEdit* edits;         // of all rows; may be null where no row has any
  int32_t* tokens;          // [S]; -1 where a logit is NaN or +infinity, or all are -infinity
  int32_t* sampled;         // device token slots: sampled[token_slot] = max(token, 0); may be null
  float* logprobs;          // [S] of the sampled token
  int32_t* top_ids;         // [S, max_top], best first
  float* top_logprobs;      // [S, max_top]
  int32_t S, vocab, max_top;
};

// What a backend needs to know of a model and of the largest step: whether it can serve it, and how
// much scratch its ops take beside their params.
struct ModelShape {
  int64_t H = 0, vocab = 0, dense_width = 0, I = 0;  // dense_width: of the dense feed-forward
  int32_t N = 0, P = 0, R = 0, V = 0, L = 0, q_rank = 0;
  int32_t E = 0, S = 0, K = 0;
  int64_t max_decode_rows = 0;  // D
  int64_t max_mlp_rows = 0;     // rows of one call of experts()
  int64_t max_splits = 0;       // decode splits of a step
  int64_t max_samples = 0;      // rows of one call of sample()
};

// What a device does at best, as measured on it; 0: not known.
struct DevicePeaks {
  double flops = 0;             // of dense products in the run dtype, FLOP/s
  double bytes_per_second = 0;  // of its memory, read and written bytes together
};

// An op throws Error where its sizes are beyond what check() lets through, or the device refuses
// the work. What fails on a device that is still computing is thrown by a later call, at the latest
// by one that waits: download, wait, synchronize.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;  // "cpu", "cuda"
  // Of a backend that hands on to another: that one.
  virtual Backend& device() { return *this; }
  virtual DType dtype() const = 0;  // the run dtype

  // Memory of the device, zeroed, freed with the backend. Throws Error that names `what` and the
  // size.
  virtual void* allocate(size_t bytes, const std::string& what) = 0;
  // Transfers are in order with the ops. upload() returns when `from` may be used again; download()
  // waits for everything before it.
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;
  // A download that does not wait: `to` is memory of allocate_host() and is filled when
  // wait(ticket) returns.
  virtual void* allocate_host(size_t bytes) = 0;
  virtual uint64_t download_later(void* to, const void* from, size_t bytes) = 0;
  virtual void wait(uint64_t ticket) = 0;
  virtual void synchronize() {}
  // In order with the ops: the device's clock in nanoseconds, which only goes up.
  virtual void stamp(uint64_t* at) = 0;
  // Takes memory of its own while it measures, beside that of any plan.
  virtual DevicePeaks measure_peaks() { return {}; }

  // Bytes of the device that are taken, by this program and others, as its driver says; 0: unknown.
  virtual uint64_t memory_in_use() const { return 0; }

  // Throws Error, naming the size, where the backend cannot serve the model.
  virtual void check(const ModelShape&) const {}
  // Device memory for ops' own use, of scratch_bytes(shape); handed over before the first op.
  virtual size_t scratch_bytes(const ModelShape&) const { return 0; }
  virtual void use_scratch(void*, const ModelShape&) {}

  // Runs `ops`, calls of ops alone. A device with graphs records them under `key` the first time
  // and replays the record from then on: all that may differ between calls of one key is the
  // content of device memory.
  virtual void replay(uint64_t /*key*/, const std::function<void()>& ops) { ops(); }

  // A weight, filled piece by piece: rows [row_begin, row_begin + source.rows) of one expert.
  // `stored` is the dtype of the sources; a bfloat16 run stores bf16 always. `source` stays as it
  // is until finish_matrix returns.
  virtual Matrix create_matrix(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols,
                               DType stored, int32_t heads = 0, int32_t nope_dim = 0) = 0;
  virtual void set_rows(const Matrix& matrix, int64_t expert, int64_t row_begin,
                        const HostTensor& source) = 0;
  // After the last set_rows.
  virtual void finish_matrix(Matrix& matrix) = 0;
  // Instead of set_rows: the source is made in place. It may have fewer columns than the matrix,
  // which keeps its zeros there. False where the backend leaves that to the caller.
  virtual bool fill_normal(const Matrix& /*matrix*/, int64_t /*expert*/, int64_t /*row_begin*/,
                           const NormalTensor& /*source*/) {
    return false;
  }
  // Bytes that create_matrix would take.
  virtual size_t matrix_bytes(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols,
                              DType stored, int32_t heads = 0, int32_t nope_dim = 0) const = 0;

  virtual void embed(const EmbedParams&) = 0;
  virtual void add_norm(const AddNormParams&) = 0;
  virtual void norm(const NormParams&) = 0;
  virtual void linear(const LinearParams&) = 0;
  virtual void gated_linear(const GatedLinearParams&) = 0;
  virtual void rope_cache(const RopeCacheParams&) = 0;
  virtual void kv_up(const KvUpParams&) = 0;
  virtual void mla_prefill(const MlaPrefillParams&) = 0;
  virtual void mla_decode(const MlaDecodeParams&) = 0;
  virtual void router(const RouterParams&) = 0;
  virtual void experts(const ExpertsParams&) = 0;
  virtual void combine(const CombineParams&) = 0;
  virtual void join_columns(const JoinColumnsParams&) = 0;
  virtual void sample(const SampleParams&) = 0;
};

}  // namespace mla
