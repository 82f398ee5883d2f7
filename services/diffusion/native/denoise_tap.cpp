// Watches the denoiser of stable-diffusion.cpp without changing the engine: a run can be ended at its next step, the results of
// its first steps can be kept, and kept ones can stand in for computing them again.
//
// The engine's shared library exports its inline C++ functions as weak symbols and calls them through dynamic relocations. This
// library defines one of them, the lambda that computes a denoising step, and is loaded before the engine with RTLD_GLOBAL, so
// the loader binds the engine's calls to the definition here; the engine's own is found with dlsym on its handle. tap_bind proves
// in the loaded image that this has happened and that tensors are laid out as below, and refuses otherwise.
#include <dlfcn.h>
#include <elf.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tap.h"

// StableDiffusionGGML::sample(...)::{lambda(sd::Tensor<float> const&, float, int)}::operator()
#define DENOISE                                                                                                           \
    "_ZZN19StableDiffusionGGML6sampleERKSt10shared_ptrI14DiffusionModelEbRKN2sd6TensorIfEES7_RK11SDConditionSC_SC_SC_S9_" \
    "fRK20sd_guidance_params_tfi15sample_method_tbRKSt6vectorIfSaIfEEiRKSH_IS7_SaIS7_EEbS9_S9_fPK17sd_cache_params_"      \
    "tENKUlS9_fiE_clES9_fi"
// sd::zeros<float>(std::vector<long>)
#define ZEROS "_ZN2sd5zerosIfEENS_6TensorIT_EESt6vectorIlSaIlEE"

using Denoise = Floats (*)(const void*, const Floats&, float, int);

namespace {

Denoise engines_own;

}  // namespace

__thread Run* current;

EXPORT Floats tap_denoise(const void* self, const Floats& x, float sigma, int step) asm(DENOISE);
// An empty result ends the run: the sampler gives up and the engine returns no picture.
Floats tap_denoise(const void* self, const Floats& x, float sigma, int step) {
    Run* run = current;
    if (run == nullptr) return engines_own(self, x, sigma, step);
    if (run->stop || run->misfit) return {};
    if (run->given < run->replay_blocks) {
        if (x.data_.size() != run->block) {
            run->misfit = true;
            return {};
        }
        const float* begin = run->replay.data() + run->given++ * run->block;
        Floats stored;
        stored.data_.assign(begin, begin + run->block);
        stored.shape_ = x.shape_;
        return stored;
    }
    run->calls++;
    Floats result = engines_own(self, x, sigma, step);
    if (std::abs(step) <= run->record_steps && !result.data_.empty()) {
        run->block = result.data_.size();
        run->recorded.insert(run->recorded.end(), result.data_.begin(), result.data_.end());
        run->recorded_blocks++;
    }
    return result;
}

bool leads_here(const link_map* library, const char* name, const void* here, const void* engines_own, std::string& why) {
    const char* names = nullptr;
    const ElfW(Sym)* symbols = nullptr;
    const ElfW(Rela)* tables[2] = {nullptr, nullptr};
    size_t bytes[2] = {0, 0};
    for (const ElfW(Dyn)* each = library->l_ld; each->d_tag != DT_NULL; each++) {
        switch (each->d_tag) {
            case DT_STRTAB: names = reinterpret_cast<const char*>(each->d_un.d_ptr); break;
            case DT_SYMTAB: symbols = reinterpret_cast<const ElfW(Sym)*>(each->d_un.d_ptr); break;
            case DT_RELA: tables[0] = reinterpret_cast<const ElfW(Rela)*>(each->d_un.d_ptr); break;
            case DT_RELASZ: bytes[0] = each->d_un.d_val; break;
            case DT_JMPREL: tables[1] = reinterpret_cast<const ElfW(Rela)*>(each->d_un.d_ptr); break;
            case DT_PLTRELSZ: bytes[1] = each->d_un.d_val; break;
            default: break;
        }
    }
    if (names == nullptr || symbols == nullptr) {
        why = "the engine's library has no dynamic symbols";
        return false;
    }
    int references = 0;
    for (int table = 0; table < 2; table++) {
        for (size_t place = 0; place < bytes[table] / sizeof(ElfW(Rela)); place++) {
            const ElfW(Rela)& entry = tables[table][place];
            const size_t symbol = sizeof(void*) == 8 ? entry.r_info >> 32 : entry.r_info >> 8;
            if (symbol == 0 || std::strcmp(names + symbols[symbol].st_name, name) != 0) continue;
            references++;
            const void* target = *reinterpret_cast<void* const*>(library->l_addr + entry.r_offset);
            // A call that was never made may still lead to the loader, which will look the name up then.
            const bool is_lazy = table == 1 && target != engines_own;
            if (target == here || (is_lazy && dlsym(RTLD_DEFAULT, name) == here)) continue;
            why = "the engine calls its own function: it was loaded first, or another library stands between";
            return false;
        }
    }
    if (references == 0) why = "the engine's function cannot be reached: it was inlined, or linked to itself";
    return references > 0;
}

int refused(const std::string& why, char* text, size_t size) {
    std::snprintf(text, size, "%s", why.c_str());
    return 0;
}

extern "C" {

// Proves that the engine (a handle of dlopen) is watched. Returns 1, or 0 with the reason in `text`.
EXPORT int tap_bind(void* engine, char* text, size_t size) {
    link_map* library = nullptr;
    if (dlinfo(engine, RTLD_DI_LINKMAP, &library) != 0) return refused("the engine's library is not loaded", text, size);
    engines_own = reinterpret_cast<Denoise>(dlsym(engine, DENOISE));
    if (engines_own == nullptr) return refused("this build of the engine has no such denoiser", text, size);
    if (engines_own == tap_denoise) return refused("the engine's own denoiser was not found", text, size);
    std::string why;
    const void* here = reinterpret_cast<void*>(tap_denoise);
    if (!leads_here(library, DENOISE, here, reinterpret_cast<void*>(engines_own), why)) return refused(why, text, size);
    auto zeros = reinterpret_cast<Floats (*)(std::vector<int64_t>)>(dlsym(engine, ZEROS));
    if (zeros == nullptr) return refused("this build of the engine has no such tensors", text, size);
    const Floats probe = zeros({2, 3});
    if (probe.shape_ != std::vector<int64_t>{2, 3} || probe.data_ != std::vector<float>(6)) {
        return refused("this build of the engine lays tensors out in another way", text, size);
    }
    return 1;
}

// `replay`: blocks of so many numbers, the results of the first calls; `record_steps`: steps whose results are kept.
EXPORT Run* tap_new(const float* replay, size_t blocks, size_t block, int record_steps) {
    Run* run = new Run;
    if (blocks > 0) run->replay.assign(replay, replay + blocks * block);
    run->replay_blocks = blocks;
    run->block = block;
    run->record_steps = record_steps;
    return run;
}
EXPORT void tap_enter(Run* run) { current = run; }  // on the thread that is about to generate
EXPORT void tap_leave() { current = nullptr; }
EXPORT void tap_stop(Run* run) { run->stop = true; }  // on any thread
EXPORT int tap_calls(const Run* run) { return run->calls; }
EXPORT int tap_misfit(const Run* run) { return run->misfit; }
EXPORT const float* tap_recorded(const Run* run, size_t* blocks, size_t* block) {
    *blocks = run->recorded_blocks;
    *block = run->recorded_blocks > 0 ? run->recorded.size() / run->recorded_blocks : 0;
    return run->recorded.data();
}
EXPORT void tap_delete(Run* run) { delete run; }
}
