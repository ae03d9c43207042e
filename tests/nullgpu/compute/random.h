// Random numbers as a GPU draws them: Philox, seeded by torch's generator, with CUDA's mapping of elements to threads.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace gpu_random {

// Where a generator stands before an operator draws, and the size of the GPU, which decides which thread draws which element.
struct Stream {
  uint64_t seed = 0, offset = 0;
  int64_t processors = 0, threads_each = 0; // multiprocessors, and how many threads one of them holds
};

bool draws_as_gpu(const std::string& name);

// Whether CUDA's implementation consists of other operators, which are to be computed as such: only what is left is drawn.
bool is_composed(const std::string& name);

// Draws what an operator's kernels would have drawn. Arguments and outputs are CPU tensors on the GPU's memory, after CUDA's implementation.
void draw(const std::string& name, const std::vector<at::IValue>& arguments, const std::vector<at::IValue>& outputs, const Stream& stream);

// The mask of CUTLASS's attention ("efficient"), 0 or 1 / (1 - p), from the seed and offset that it kept.
at::Tensor attention_mask(at::IntArrayRef sizes, double p, uint64_t seed, uint64_t offset);

} // namespace gpu_random
