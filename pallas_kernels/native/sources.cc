// The digest (sources.py) of the C++ sources that the library was compiled from. native/__init__.py compares it with
// the digest of the sources in its folder.

extern "C" const char* jax_paged_sources() { return JAX_PAGED_SOURCES; }
