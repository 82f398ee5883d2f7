// What the parts of this library share: the engine's tensors as they lie in memory, one generation, and the proof that a call of
// the engine leads here.
//
// No header of the engine is included: it would compile inline functions a second time, and they would take the engine's place.
// Built with hidden visibility, and exports.map, for the same reason; see build.py beside this file.
#pragma once
#include <link.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#define EXPORT __attribute__((visibility("default")))

namespace sd {
template <class T>
struct Tensor {
    std::vector<T> data_;
    std::vector<int64_t> shape_;
};
}  // namespace sd

using Floats = sd::Tensor<float>;
using Integers = sd::Tensor<int32_t>;

// One generation. `calls` were computed, `given` came from `replay`; `misfit`: what was to be replayed is of another size.
struct Run {
    std::atomic<bool> stop{false};
    std::vector<float> replay;
    size_t replay_blocks = 0;
    size_t block = 0;
    int record_steps = 0;
    int calls = 0;
    size_t given = 0;
    bool misfit = false;
    std::vector<float> recorded;
    size_t recorded_blocks = 0;
    // What decides how prompts are encoded beside their texts; empty: none is kept or recalled.
    std::string context;
    std::string prompt;
    std::string negative_prompt;
    int prompts_encoded = 0;
    int prompts_recalled = 0;
    int prompts_evicted = 0;
};

extern __thread Run* current;  // the engine generates on the thread that asked it to

// Returns whether every reference of a loaded library to the function `name` leads to `here`, and that there is one; else `why`.
bool leads_here(const link_map* library, const char* name, const void* here, const void* engines_own, std::string& why);
int refused(const std::string& why, char* text, size_t size);
