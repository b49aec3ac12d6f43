// The handlers that XLA calls.

#include <cstdint>
#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Copies each token's keys and values into its slot.
ffi::Error WriteKv(ffi::AnyBuffer pool, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> slots,
                   ffi::Result<ffi::AnyBuffer> out) {
  if (pool.untyped_data() != out->untyped_data()) return ffi::Error::Internal("the pool was copied");
  const auto shape = pool.dimensions();
  const int64_t num_pages = shape[0], kv_heads = shape[2], page_size = shape[3];
  const int64_t row = shape[4] * ffi::ByteWidth(pool.element_type());
  char* base = static_cast<char*>(out->untyped_data());
  const char* const from[2] = {static_cast<const char*>(k.untyped_data()),
                               static_cast<const char*>(v.untyped_data())};
  for (int64_t t = 0; t < slots.dimensions()[0]; t++) {
    const int64_t slot = slots.typed_data()[t];
    if (slot < 0) return ffi::Error::InvalidArgument("slot_mapping has a negative slot");
    if (slot >= num_pages * page_size) continue;
    for (int64_t i = 0; i < 2 * kv_heads; i++) {
      const int64_t tile = (slot / page_size * 2 * kv_heads + i) * page_size;
      std::memcpy(base + (tile + slot % page_size) * row, from[i / kv_heads] + (t * kv_heads + i % kv_heads) * row,
                  row);
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(WriteKvHandler, WriteKv,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
