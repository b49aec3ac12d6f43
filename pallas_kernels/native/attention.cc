// The FFI handlers of the operations on the KV cache. ops.py documents the operations, and attention.py calls the
// handlers.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_set>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention.h"
#include "parallel.h"
#include "plan.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged {
namespace {

using Indices = ffi::Buffer<ffi::S32, 1>;
using Tables = ffi::Buffer<ffi::S32, 2>;
using PerHead = ffi::Buffer<ffi::F32, 1>;
using Bias = ffi::Buffer<ffi::F32, 2>;

#if defined(__x86_64__)
// Returns whether the processor has AMX for bfloat16, and requests permission from Linux to use it.
bool allows_tiles() {
  unsigned a, b, c, d;
  constexpr unsigned kAmxBf16 = 1 << 22, kAmxTile = 1 << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

}  // namespace

const Kernels& choose_kernels(int64_t max_width) {
#if defined(__x86_64__)
  if (max_width >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    if (max_width < 32 || !__builtin_cpu_supports("avx512bf16")) return kAvx512Kernels;
    static const bool has_tiles = allows_tiles();
    return max_width >= 256 && has_tiles ? kAmxKernels : kAvx512Bf16Kernels;
  }
  if (max_width >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2Kernels;
#endif
  return kBaselineKernels;
}

namespace {

// The pool as bytes. A page consists of kv_heads tiles of keys, followed by kv_heads tiles of values except in a latent
// pool. A tile is page_size rows. In a quantized pool, the scales of all rows follow their numbers (quantization.py).
struct Pool {
  char* data;
  int64_t pages, tiles, page_size, row_bytes, scale_bytes;

  explicit Pool(ffi::AnyBuffer buffer)
      : data(static_cast<char*>(buffer.untyped_data())),
        pages(buffer.dimensions()[0]),
        tiles(buffer.dimensions()[1] * buffer.dimensions()[2]),
        page_size(buffer.dimensions()[3]),
        row_bytes(buffer.dimensions()[4] * int64_t(ffi::ByteWidth(buffer.element_type()))),
        scale_bytes(ffi::ByteWidth(buffer.element_type()) == 1) {}

  int64_t page_bytes() const { return tiles * page_size * row_bytes; }
};

ffi::Error WriteKv(ffi::ThreadPool threads, ffi::AnyBuffer kv_pages, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   Indices slot_mapping, ffi::Result<ffi::AnyBuffer> out) {
  if (kv_pages.untyped_data() != out->untyped_data()) return ffi::Error::Internal("XLA copied the pool");
  const Pool pool(kv_pages);
  const int64_t tokens = slot_mapping.dimensions()[0], kv_heads = kv_pages.dimensions()[2];
  const int32_t* slots = slot_mapping.typed_data();
  if (std::any_of(slots, slots + tokens, [](int32_t slot) { return slot < 0; })) {
    return ffi::Error::InvalidArgument("slot_mapping has a negative slot");
  }
  const char* from[] = {static_cast<const char*>(k.untyped_data()), static_cast<const char*>(v.untyped_data())};
  constexpr int64_t PART = 64;  // tokens
  const auto write = [&](int64_t part) {
    for (int64_t t = part * PART; t < std::min((part + 1) * PART, tokens); t++) {
      const int64_t slot = slots[t];
      if (slot >= pool.pages * pool.page_size) continue;
      char* to = pool.data + slot / pool.page_size * pool.page_bytes();
      const int64_t offset = slot % pool.page_size, bytes = pool.row_bytes - pool.scale_bytes;
      for (int64_t i = 0; i < pool.tiles; i++, to += pool.page_size * pool.row_bytes) {
        const char* row = from[i / kv_heads] + (t * kv_heads + i % kv_heads) * pool.row_bytes;
        std::memcpy(to + offset * bytes, row, bytes);
        std::memcpy(to + pool.page_size * bytes + offset, row + bytes, pool.scale_bytes);
      }
    }
  };
  const int64_t parts = (tokens + PART - 1) / PART;
  parallel_for(parts, std::max<int64_t>(std::min(threads.num_threads(), parts / 2) - 1, 0),
               [&](auto task) { threads.Schedule(std::move(task)); }, write);
  return ffi::Error::Success();
}

ffi::Error CopyBlocks(ffi::AnyBuffer kv_pages, Indices src, Indices dst, ffi::Result<ffi::AnyBuffer> out) {
  if (kv_pages.untyped_data() != out->untyped_data()) return ffi::Error::Internal("XLA copied the pool");
  const Pool pool(kv_pages);
  const int64_t bytes = pool.page_bytes();
  struct Copy {
    int64_t from, to;
  };
  std::vector<Copy> copies;
  std::unordered_set<int64_t> read;
  for (int64_t i = 0; i < int64_t(src.dimensions()[0]); i++) {
    const Copy copy = {src.typed_data()[i], dst.typed_data()[i]};
    if (copy.from < 0 || copy.to < 0) return ffi::Error::InvalidArgument("a page to copy is negative");
    if (copy.from >= pool.pages || copy.to >= pool.pages) continue;
    copies.push_back(copy);
    read.insert(copy.from);
  }
  // If a page is both read and written, all pages are read into a buffer before any page is written.
  std::vector<char> buffer;
  if (std::any_of(copies.begin(), copies.end(), [&](const Copy& copy) { return read.count(copy.to) > 0; })) {
    buffer.resize(copies.size() * bytes);
    for (size_t i = 0; i < copies.size(); i++) {
      std::memcpy(buffer.data() + i * bytes, pool.data + copies[i].from * bytes, bytes);
    }
  }
  for (size_t i = 0; i < copies.size(); i++) {
    const char* from = buffer.empty() ? pool.data + copies[i].from * bytes : buffer.data() + i * bytes;
    std::memcpy(pool.data + copies[i].to * bytes, from, bytes);
  }
  return ffi::Error::Success();
}

ffi::Error Attend(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer kv_pages,
                  Tables block_tables, Indices context_lens, Indices query_start_loc,
                  PerHead sinks, Bias distance_bias, Indices shared_blocks,
                  ffi::Result<ffi::AnyBuffer> out, float scale, int64_t window, float soft_cap, int64_t max_width) {
  const auto q_shape = q.dimensions(), pool_shape = kv_pages.dimensions(), tables_shape = block_tables.dimensions();
  Attention a = {};
  switch (q.element_type()) {
    case ffi::F32: a.dtype = DType::kFloat32; break;
    case ffi::BF16: a.dtype = DType::kBFloat16; break;
    case ffi::F16: a.dtype = DType::kFloat16; break;
    default: return ffi::Error::InvalidArgument("q is not float32, bfloat16 or float16");
  }
  switch (kv_pages.element_type()) {
    case ffi::S8: a.pool_type = PoolType::kInt8; break;
    case ffi::U8: a.pool_type = PoolType::kFloat8; break;
    default: a.pool_type = PoolType::kAsQueries;
  }
  a.q = q.untyped_data(), a.pool = kv_pages.untyped_data(), a.out = out->untyped_data();
  a.tables = block_tables.typed_data(), a.lens = context_lens.typed_data();
  a.starts = query_start_loc.element_count() ? query_start_loc.typed_data() : nullptr;
  a.rows = q_shape[0], a.heads = q_shape[1], a.head_dim = q_shape[2];
  a.pages = pool_shape[0], a.parts = pool_shape[1], a.kv_heads = pool_shape[2], a.page_size = pool_shape[3];
  a.value_dim = out->dimensions()[2];
  a.seqs = tables_shape[0], a.columns = tables_shape[1];
  a.scale = scale, a.soft_cap = soft_cap, a.window = window;
  a.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  a.bias = distance_bias.element_count() ? distance_bias.typed_data() : nullptr;
  a.bias_len = distance_bias.dimensions()[1];
  a.shared = shared_blocks.element_count() ? shared_blocks.typed_data() : nullptr;

  const int64_t num_threads = std::max<int64_t>(threads.num_threads(), 1);
  Plan plan(a, choose_kernels(max_width), num_threads);
  if (!plan.error().empty()) return ffi::Error::InvalidArgument(plan.error());
  plan.run(num_threads, [&](auto task) { threads.Schedule(std::move(task)); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jax_paged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_paged_write_kv, jax_paged::WriteKv,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jax_paged::Indices>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_paged_copy_blocks, jax_paged::CopyBlocks,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jax_paged::Indices>()
                                  .Arg<jax_paged::Indices>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_paged_attend, jax_paged::Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<jax_paged::Tables>()
                                  .Arg<jax_paged::Indices>()
                                  .Arg<jax_paged::Indices>()
                                  .Arg<jax_paged::PerHead>()
                                  .Arg<jax_paged::Bias>()
                                  .Arg<jax_paged::Indices>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("max_width"));
