// The part of oneDNN's C interface that products.cc uses, which is stable within a major version. The functions are
// looked up at run time (`Load`), so that neither building nor loading this library needs oneDNN.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

namespace jax_paged::onednn {

// Pointers to oneDNN's objects; their types don't matter here.
using Handle = void*;

struct Version {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime, gpu_runtime;
};

struct Argument {
  int kind;
  Handle memory;
};

// Values of oneDNN's enumerations.
constexpr int kMajorVersion = 3, kSequential = 1, kOpenMp = 2;
constexpr int kCpu = 1, kInOrder = 1, kBFloat16 = 2, kFloat32 = 3, kAnyFormat = 1;
constexpr int kStrictMath = 0, kScratchpadOfUser = 1;
constexpr int kImplementationName = 8, kSourceShape = 129, kKernelShape = 131, kResultShape = 133, kScratchpad = 136;
constexpr int kSource = 1, kResult = 17, kKernel = 33, kScratchpadArgument = 80;
// The second argument of the second operation after a product: the factors by which GatedAttributes multiplies.
constexpr int kFactors = 2 * 0x8000 + 2;
constexpr int kRelu = 0x20, kGeluTanh = 0x2b, kSwish = 0x2c, kGeluErf = 0x31, kMultiply = 0x1fff1;

// oneDNN's functions, and the objects that all calls share.
struct OneDnn {
  const Version* (*dnnl_version)();
  int (*dnnl_engine_create)(Handle*, int kind, size_t index);
  int (*dnnl_stream_create)(Handle*, Handle engine, unsigned flags);
  int (*dnnl_stream_destroy)(Handle);
  int (*dnnl_memory_create)(Handle*, Handle shape, Handle engine, void* data);
  int (*dnnl_memory_destroy)(Handle);
  int (*dnnl_memory_desc_create_with_strides)(Handle*, int rank, const int64_t* sizes, int type, const int64_t* strides);
  int (*dnnl_memory_desc_create_with_tag)(Handle*, int rank, const int64_t* sizes, int type, int tag);
  int (*dnnl_memory_desc_destroy)(Handle);
  size_t (*dnnl_memory_desc_get_size)(Handle);
  int (*dnnl_primitive_attr_create)(Handle*);
  int (*dnnl_primitive_attr_set_fpmath_mode)(Handle, int);
  int (*dnnl_primitive_attr_set_scratchpad_mode)(Handle, int);
  int (*dnnl_primitive_attr_set_post_ops)(Handle, Handle post_ops);
  int (*dnnl_post_ops_create)(Handle*);
  int (*dnnl_post_ops_append_eltwise)(Handle, int kind, float alpha, float beta);
  int (*dnnl_post_ops_append_binary)(Handle, int kind, Handle shape);
  int (*dnnl_matmul_primitive_desc_create)(Handle*, Handle engine, Handle source, Handle kernel, Handle bias,
                                           Handle result, Handle attributes);
  int (*dnnl_reorder_primitive_desc_create)(Handle*, Handle from, Handle from_engine, Handle to, Handle to_engine,
                                            Handle attributes);
  int (*dnnl_primitive_desc_query)(Handle, int what, int index, void* result);
  Handle (*dnnl_primitive_desc_query_md)(Handle, int what, int index);
  int (*dnnl_primitive_desc_destroy)(Handle);
  int (*dnnl_primitive_create)(Handle*, Handle description);
  int (*dnnl_primitive_destroy)(Handle);
  int (*dnnl_primitive_execute)(Handle, Handle stream, int num_arguments, const Argument*);
  // Null in a build without threads.
  int (*omp_get_max_threads)();
  void (*omp_set_num_threads)(int);

  Handle engine, attributes;
  int64_t num_threads;
};

inline void Check(int status, const char* what) {
  if (status == 0) return;
  throw std::runtime_error(std::string("oneDNN: ") + what + " failed with status " + std::to_string(status));
}

template <class F>
void Find(void* file, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(file, name));
  if (function == nullptr) throw std::runtime_error(std::string("it has no function ") + name);
}

// Returns the attributes of all products.
inline Handle Attributes(const OneDnn& f) {
  Handle attributes;
  Check(f.dnnl_primitive_attr_create(&attributes), "dnnl_primitive_attr_create");
  // float32 is multiplied as float32 even if an environment variable allows less precision.
  Check(f.dnnl_primitive_attr_set_fpmath_mode(attributes, kStrictMath), "dnnl_primitive_attr_set_fpmath_mode");
  // Each thread passes its own scratchpad, because threads that run the same product would share oneDNN's.
  Check(f.dnnl_primitive_attr_set_scratchpad_mode(attributes, kScratchpadOfUser),
        "dnnl_primitive_attr_set_scratchpad_mode");
  return attributes;
}

// Returns the attributes of a product to which an activation is applied, and whose result is multiplied by factors.
inline Handle GatedAttributes(const OneDnn& f, int activation, Handle factors) {
  Handle then;
  Check(f.dnnl_post_ops_create(&then), "dnnl_post_ops_create");
  Check(f.dnnl_post_ops_append_eltwise(then, activation, activation == kSwish ? 1.0f : 0.0f, 0.0f), "an activation");
  Check(f.dnnl_post_ops_append_binary(then, kMultiply, factors), "factors");
  const Handle attributes = Attributes(f);
  Check(f.dnnl_primitive_attr_set_post_ops(attributes, then), "dnnl_primitive_attr_set_post_ops");
  return attributes;
}

// Returns oneDNN's number for an activation with the name that models/layers.py uses.
inline int ActivationOf(std::string_view name) {
  if (name == "silu") return kSwish;
  if (name == "relu") return kRelu;
  if (name == "gelu") return kGeluErf;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return kGeluTanh;
  throw std::invalid_argument("unknown activation " + std::string(name));
}

// Loads oneDNN from a file; throws std::runtime_error with the reason if it can't be used.
inline const OneDnn* Load(const char* path) {
  void* const file = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) throw std::runtime_error(dlerror());
  auto found = std::make_unique<OneDnn>();
  OneDnn& f = *found;
  Find(file, "dnnl_version", f.dnnl_version);
  const Version& version = *f.dnnl_version();
  if (version.major != kMajorVersion) {
    throw std::runtime_error("it is version " + std::to_string(version.major) + "." + std::to_string(version.minor) +
                             "." + std::to_string(version.patch) + "; allowed: 3.x");
  }
  if (version.cpu_runtime == kOpenMp) {
    Find(file, "omp_get_max_threads", f.omp_get_max_threads);
    Find(file, "omp_set_num_threads", f.omp_set_num_threads);
  } else if (version.cpu_runtime != kSequential) {
    throw std::runtime_error("its threads are of kind " + std::to_string(version.cpu_runtime) +
                             "; allowed: a build with OpenMP, or without threads");
  }
#define FIND(name) Find(file, #name, f.name)
  FIND(dnnl_engine_create);
  FIND(dnnl_stream_create);
  FIND(dnnl_stream_destroy);
  FIND(dnnl_memory_create);
  FIND(dnnl_memory_destroy);
  FIND(dnnl_memory_desc_create_with_strides);
  FIND(dnnl_memory_desc_create_with_tag);
  FIND(dnnl_memory_desc_destroy);
  FIND(dnnl_memory_desc_get_size);
  FIND(dnnl_primitive_attr_create);
  FIND(dnnl_primitive_attr_set_fpmath_mode);
  FIND(dnnl_primitive_attr_set_scratchpad_mode);
  FIND(dnnl_primitive_attr_set_post_ops);
  FIND(dnnl_post_ops_create);
  FIND(dnnl_post_ops_append_eltwise);
  FIND(dnnl_post_ops_append_binary);
  FIND(dnnl_matmul_primitive_desc_create);
  FIND(dnnl_reorder_primitive_desc_create);
  FIND(dnnl_primitive_desc_query);
  FIND(dnnl_primitive_desc_query_md);
  FIND(dnnl_primitive_desc_destroy);
  FIND(dnnl_primitive_create);
  FIND(dnnl_primitive_destroy);
  FIND(dnnl_primitive_execute);
#undef FIND
  Check(f.dnnl_engine_create(&f.engine, kCpu, 0), "dnnl_engine_create");
  f.attributes = Attributes(f);
  // The layout of packed kernels depends on this number, so it must not change.
  f.num_threads = std::max(1u, std::thread::hardware_concurrency());
  return found.release();
}

}  // namespace jax_paged::onednn
