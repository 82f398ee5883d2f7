// Keeps what the engine's text encoders make of prompts, and hands it out again instead of encoding the same prompt once more.
//
// Each of the engine's text encoders has one function for that, reached through its table of virtual functions, which the loader
// fills by name: as denoise_tap.cpp does, this library defines those names. An encoded prompt is an object of the engine's; that it
// is laid out as below is proven with the engine's own constructors before any is kept. How a prompt is handed to an encoder cannot
// be proven so: its text has to be one of those that the generation was asked for, else it is encoded as if nobody watched.
#include <dlfcn.h>

#include <cstring>
#include <list>
#include <mutex>
#include <new>
#include <optional>
#include <unordered_map>
#include <utility>

#include "tap.h"

// With a name of its own: functions of nameless types could not be found by theirs.
namespace tap {

// An encoded prompt: the engine's SDCondition.
struct Condition {
    Floats cross_attention;
    Floats vector;
    Floats concat;
    Integers t5_ids;
    Floats t5_weights;
    std::vector<Floats> extra;
};

// What an encoder is asked for: the beginning of the engine's ConditionerParams.
struct Asked {
    std::string text;
    int32_t clip_skip;
    int32_t width;
    int32_t height;
    int32_t adm_channels;
    bool is_masked_zero;
    int32_t pictures;
};

}  // namespace tap

using tap::Asked;
using tap::Condition;
using Encode = Condition (*)(void*, int, const Asked&);

namespace {

template <class T>
size_t bytes_of(const sd::Tensor<T>& tensor) {
    return tensor.data_.size() * sizeof(T) + tensor.shape_.size() * sizeof(int64_t);
}

size_t bytes_of(const Condition& condition) {
    size_t bytes = sizeof condition + bytes_of(condition.cross_attention) + bytes_of(condition.vector);
    bytes += bytes_of(condition.concat) + bytes_of(condition.t5_ids) + bytes_of(condition.t5_weights);
    for (const Floats& each : condition.extra) bytes += sizeof each + bytes_of(each);
    return bytes;
}

// Encoded prompts, the one used last in front; bounded in number and bytes. Used by the thread that generates and the one that
// hears orders.
class Shelf {
   public:
    void bound(size_t entries, size_t bytes) {
        const std::lock_guard<std::mutex> guard(lock_);
        most_entries_ = entries;
        most_bytes_ = bytes;
        shrink();
    }

    std::optional<Condition> find(const std::string& key) {
        const std::lock_guard<std::mutex> guard(lock_);
        const auto found = places_.find(key);
        if (found == places_.end()) return std::nullopt;
        entries_.splice(entries_.begin(), entries_, found->second);
        return found->second->second;
    }

    // Returns how many others went for it; one that is too large alone is not kept.
    int keep(const std::string& key, const Condition& condition) {
        const size_t size = bytes_of(condition) + key.size();
        const std::lock_guard<std::mutex> guard(lock_);
        if (most_entries_ == 0 || size > most_bytes_ || places_.count(key) != 0) return 0;
        entries_.emplace_front(key, condition);
        places_[key] = entries_.begin();
        bytes_ += size;
        return shrink();
    }

    void clear() {
        const std::lock_guard<std::mutex> guard(lock_);
        places_.clear();
        entries_.clear();
        bytes_ = 0;
    }

    void sizes(size_t* entries, size_t* bytes) {
        const std::lock_guard<std::mutex> guard(lock_);
        *entries = entries_.size();
        *bytes = bytes_;
    }

   private:
    int shrink() {
        int gone = 0;
        for (; entries_.size() > most_entries_ || bytes_ > most_bytes_; gone++) {
            const auto& last = entries_.back();
            bytes_ -= bytes_of(last.second) + last.first.size();
            places_.erase(last.first);
            entries_.pop_back();
        }
        return gone;
    }

    std::mutex lock_;
    size_t most_entries_ = 0;
    size_t most_bytes_ = 0;
    size_t bytes_ = 0;
    std::list<std::pair<std::string, Condition>> entries_;
    std::unordered_map<std::string, std::list<std::pair<std::string, Condition>>::iterator> places_;
};

Shelf shelf;
bool is_proven = false;

template <class T>
void append(std::string& key, const T& value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// The place of a prompt among those of a generation tells prompts from negative ones, which some models encode differently.
std::string key_of(const Run& run, int encoder, const Asked& asked) {
    std::string key = run.context;
    append(key, encoder);
    append(key, run.prompts_encoded + run.prompts_recalled);
    append(key, asked.clip_skip);
    append(key, asked.width);
    append(key, asked.height);
    append(key, asked.adm_channels);
    append(key, asked.is_masked_zero);
    append(key, asked.pictures);
    return key + asked.text;
}

bool is_expected(const Run& run, const Asked& asked) {
    return asked.text == run.prompt || asked.text == run.negative_prompt;
}

Condition encoded(Encode engines_own, int encoder, void* self, int threads, const Asked& asked) {
    Run* run = current;
    if (!is_proven || run == nullptr || run->context.empty() || !is_expected(*run, asked)) {
        return engines_own(self, threads, asked);
    }
    const std::string key = key_of(*run, encoder, asked);
    if (std::optional<Condition> found = shelf.find(key)) {
        run->prompts_recalled++;
        return *std::move(found);
    }
    Condition made = engines_own(self, threads, asked);
    run->prompts_encoded++;
    if (!made.cross_attention.data_.empty()) run->prompts_evicted += shelf.keep(key, made);
    return made;
}

}  // namespace

// The engine's classes of text encoders, as the compiler spells their names.
#define ENCODERS(DO)                          \
    DO(0, "33FrozenCLIPEmbedderWithCustomWords") \
    DO(1, "15SD3CLIPEmbedder")                \
    DO(2, "16FluxCLIPEmbedder")               \
    DO(3, "14T5CLIPEmbedder")                 \
    DO(4, "16AnimaConditioner")               \
    DO(5, "11LLMEmbedder")
#define ENCODE(name) "_ZN" name "21get_learned_conditionEiRK17ConditionerParams"
#define STAND_IN(place, name)                                                            \
    static Encode engines_own_##place;                                                   \
    EXPORT Condition tap_encode_##place(void*, int, const Asked&) asm(ENCODE(name));     \
    Condition tap_encode_##place(void* self, int threads, const Asked& asked) {          \
        return encoded(engines_own_##place, place, self, threads, asked);                \
    }
ENCODERS(STAND_IN)

namespace {

bool is_copy(const Condition& one, const Condition& other) {
    const auto same = [](const auto& left, const auto& right) {
        return left.data_ == right.data_ && left.shape_ == right.shape_ && left.data_.data() != right.data_.data();
    };
    return same(one.cross_attention, other.cross_attention) && same(one.vector, other.vector) &&
           same(one.concat, other.concat) && same(one.t5_ids, other.t5_ids) && same(one.t5_weights, other.t5_weights) &&
           one.extra.size() == other.extra.size() && same(one.extra.at(0), other.extra.at(0)) &&
           same(one.extra.at(1), other.extra.at(1));
}

// Returns whether the engine's constructors fill exactly what a Condition is, each part where it is expected.
bool is_laid_out_so(void* engine) {
    const auto make = reinterpret_cast<void (*)(void*)>(dlsym(engine, "_ZN11SDConditionC1Ev"));
    const auto copy = reinterpret_cast<void (*)(void*, const void*)>(dlsym(engine, "_ZN11SDConditionC1ERKS_"));
    if (make == nullptr || copy == nullptr) return false;
    constexpr unsigned char untouched = 0xA5;
    alignas(Condition) unsigned char place[2 * sizeof(Condition)];
    std::memset(place, untouched, sizeof place);
    make(place);
    for (size_t at = 0; at < sizeof place; at++) {  // an object without any number is zeros, as long as it is
        if (place[at] != (at < sizeof(Condition) ? 0 : untouched)) return false;
    }
    const Floats one{{1.0F}, {1}};
    const Condition sample{one, {{2, 3}, {2}}, {{4}, {1, 1}}, {{5, 6, 7}, {3}}, {{8}, {1}}, {{{9}, {1}}, {{10, 11}, {2, 1}}}};
    copy(place, &sample);
    const Condition* copied = std::launder(reinterpret_cast<const Condition*>(place));
    const bool is_so = is_copy(*copied, sample);
    if (is_so) copied->~Condition();
    return is_so;
}

}  // namespace

extern "C" {

// Proves that the engine (a handle of dlopen) encodes prompts through this library, and lets it keep so many of so many bytes
// together. Returns 1, or 0 with the reason in `text`; prompts are encoded all the same then.
EXPORT int tap_bind_prompts(void* engine, size_t most_entries, size_t most_bytes, char* text, size_t size) {
    link_map* library = nullptr;
    if (dlinfo(engine, RTLD_DI_LINKMAP, &library) != 0) return refused("the engine's library is not loaded", text, size);
    bool is_whole = true;
#define FIND(place, name)                                                        \
    engines_own_##place = reinterpret_cast<Encode>(dlsym(engine, ENCODE(name))); \
    is_whole = is_whole && engines_own_##place != nullptr && engines_own_##place != tap_encode_##place;
    ENCODERS(FIND)
    if (!is_whole) return refused("this build of the engine has other text encoders", text, size);
    std::string why;
    bool leads = true;
#define PROVE(place, name)                                                                         \
    leads = leads && leads_here(library, ENCODE(name), reinterpret_cast<void*>(tap_encode_##place), \
                                reinterpret_cast<void*>(engines_own_##place), why);
    ENCODERS(PROVE)
    if (!leads) return refused(why, text, size);
    if (!is_laid_out_so(engine)) return refused("this build of the engine lays encoded prompts out in another way", text, size);
    shelf.bound(most_entries, most_bytes);
    is_proven = true;
    return 1;
}

// Lets a generation keep and recall its prompts. `context`: digest of all that decides how they are encoded beside their texts.
EXPORT void tap_prompts(Run* run, const char* context, size_t size, const char* prompt, const char* negative_prompt) {
    run->context.assign(context, size);
    run->prompt = prompt;
    run->negative_prompt = negative_prompt;
}
EXPORT void tap_prompts_done(const Run* run, int* encoded, int* recalled, int* evicted) {
    *encoded = run->prompts_encoded;
    *recalled = run->prompts_recalled;
    *evicted = run->prompts_evicted;
}
EXPORT void tap_prompts_kept(size_t* entries, size_t* bytes) { shelf.sizes(entries, bytes); }
EXPORT void tap_prompts_clear() { shelf.clear(); }  // on any thread
}
