// XLA's foreign function interface, as far as attention needs it: what XLA passes to a handler, and the functions that
// a handler calls back. XLA keeps this binary interface stable, so these declarations fit every version from 0.1
// (jaxlib 0.5.0) to 0.5 (jaxlib 0.12). No XLA header is needed to build, and one binary works with all of them.
// tests/frameworks/test_jax_package.py compares them with the header of the installed jaxlib.
//
// Source: xla/ffi/api/c_api.h of OpenXLA, where each of these names has the prefix XLA_FFI_.
#pragma once

#include <cstddef>
#include <cstdint>

namespace anyflash::xla {

struct Error;    // XLA's own
struct Context;  // of one execution

/// An extension of a structure; only the one that asks for a handler's version is used here.
struct Extension {
  std::size_t struct_size;
  int type;
  Extension* next;
};
inline constexpr int metadata_extension = 1;

struct Version {
  std::size_t struct_size;
  Extension* extensions;
  int major, minor;
};
inline constexpr int oldest_minor = 1, newest_minor = 5;  ///< of the versions 0.1 to 0.5

struct Metadata {
  std::size_t struct_size;
  Version version;
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct ErrorCreateArgs {
  std::size_t struct_size;
  Extension* extensions;
  const char* message;
  int code;
};
enum ErrorCode : int { invalid_argument = 3, resource_exhausted = 8, internal = 13 };

struct StreamGetArgs {
  std::size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;  ///< out
};

struct Api {
  std::size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*error_create)(ErrorCreateArgs*);
  void (*error_message)();
  void (*error_destroy)();
  void (*handler_register)();
  Error* (*stream_get)(StreamGetArgs*);  ///< the first five of its functions
};

/// xla::PrimitiveType of the types that the library knows.
enum DataType : int { pred = 1, s32 = 4, s64 = 5, u8 = 6, f16 = 10, f32 = 11, f64 = 12, bf16 = 16 };

/// Row-major, as jax.ffi.ffi_call asks for.
struct Buffer {
  std::size_t struct_size;
  Extension* extensions;
  int type;
  void* data;
  std::int64_t rank;
  std::int64_t* sizes;
};

struct Text {
  const char* data;
  std::size_t size;
};

/// Arguments, or results.
struct Buffers {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t count;
  int* types;  ///< 1: a buffer
  Buffer** buffers;
};

/// By name, in the order of their names.
struct Attributes {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t count;
  int* types;  ///< 4: a Text
  Text** names;
  void** values;
};
inline constexpr int text_attribute = 4;

struct CallFrame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  int stage;
  Buffers arguments, results;
  Attributes attributes;
};

}  // namespace anyflash::xla
