// Errors of the handlers that XLA calls.
#pragma once

#include <exception>
#include <stdexcept>

#include "xla/ffi/api/ffi.h"

namespace jax_paged {

// Calls body(), and returns its exceptions as errors of XLA.
template <class F>
xla::ffi::Error Guarded(const F& body) {
  try {
    body();
  } catch (const std::invalid_argument& error) {
    return xla::ffi::Error::InvalidArgument(error.what());
  } catch (const std::exception& error) {
    return xla::ffi::Error::Internal(error.what());
  }
  return xla::ffi::Error::Success();
}

}  // namespace jax_paged
