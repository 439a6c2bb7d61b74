// SPDX-License-Identifier: Apache-2.0
// The library of NVIDIA's driver (libnvidia-ml.so.1) for simulated GPUs: functions of nvml.h that answer from a file.
//
// $SIMULATED_NVML is a file of lines `key value`, read at each call. A GPU's keys begin with `gpu.<index>.`, a pair's
// with `pair.<index>.<index>.`, smaller first; `gpu.*.` and `pair.*.` are for all. A value `error <code>` is that
// nvmlReturn_t, a value `hang` never returns, `grows <number>` is a counter that grows by so much a second, and a missing
// key is NVML_ERROR_NOT_SUPPORTED. Without the file there are $SIMULATED_GPUS GPUs of $SIMULATED_GPU_MEMORY bytes. A new
// function is a line that names its key.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace {

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };
using Device = std::intptr_t;  // index + 1: no handle is null
using Text = std::string;

struct Answer {
  int code;
  Text text;
};

Text variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

std::map<Text, Text> facts() {
  std::map<Text, Text> found = {
      {"driver", "580.65.06"},
      {"count", variable("SIMULATED_GPUS", "0")},
      {"gpu.*.name", "Simulated GPU"},
      {"gpu.*.capability", "9 0"},
      {"gpu.*.memory.total", variable("SIMULATED_GPU_MEMORY", "85899345920")},
      {"gpu.*.memory.used", "0"},
      {"gpu.*.processes", ""},
      {"pair.*.peer", "0"},
  };
  std::ifstream file(variable("SIMULATED_NVML", ""));
  for (Text line; std::getline(file, line);) {
    auto space = line.find(' ');
    found[line.substr(0, space)] = space == Text::npos ? "" : line.substr(space + 1);
  }
  return found;
}

Answer ask(const Text& key, const Text& general = "") {
  auto all = facts();
  auto fact = all.find(key);
  if (fact == all.end()) fact = all.find(general);
  if (fact == all.end()) return {NOT_SUPPORTED, ""};
  while (fact->second == "hang") pause();
  if (fact->second.starts_with("error ")) return {std::stoi(fact->second.substr(6)), ""};
  return {SUCCESS, fact->second};
}

Answer of_gpu(Device gpu, const Text& field) {
  return ask("gpu." + std::to_string(gpu - 1) + "." + field, "gpu.*." + field);
}

Answer of_pair(Device one, Device other, const Text& field) {
  auto [low, high] = std::minmax(one - 1, other - 1);
  return ask("pair." + std::to_string(low) + "." + std::to_string(high) + "." + field, "pair.*." + field);
}

unsigned long long value_of(const Text& text) {
  if (!text.starts_with("grows ")) return std::stoull(text);
  std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<unsigned long long>(std::stod(text.substr(6)) * now.count());
}

template <typename Number>
int number(const Answer& answer, Number* out) {
  if (answer.code == SUCCESS) *out = static_cast<Number>(value_of(answer.text));
  return answer.code;
}

int text(const Answer& answer, char* out, unsigned size) {
  if (answer.code == SUCCESS) std::snprintf(out, size, "%s", answer.text.c_str());
  return answer.code;
}

Text address(Device gpu) { return "00000000:" + std::to_string(9 + gpu) + ":00.0"; }

struct Memory {  // nvmlMemory_t
  unsigned long long total, free, used;
};
struct Memory2 {  // nvmlMemory_v2_t
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct Utilization {  // nvmlUtilization_t
  unsigned gpu, memory;
};
struct Pci {  // nvmlPciInfo_t
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char address[32];
};
struct Process {  // nvmlProcessInfo_v2_t
  unsigned pid;
  unsigned long long used;
  unsigned instance, compute_instance;
};
struct Field {  // nvmlFieldValue_t
  std::uint32_t id, scope;
  std::int64_t time, latency;
  std::uint32_t type;
  int code;
  unsigned long long value;
};
struct Event {  // nvmlEventData_t
  Device gpu;
  unsigned long long type, data;
  unsigned instance, compute_instance;
};
struct EventSet {
  Device gpu;
  unsigned delivered;
};
std::vector<EventSet> event_sets;

}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) {
  Answer answer = ask("init");
  return answer.code == NOT_SUPPORTED ? SUCCESS : answer.code;
}
int nvmlShutdown() { return SUCCESS; }
const char* nvmlErrorString(int) { return "Unknown Error"; }  // pynvml has words of its own for the others
int nvmlSystemGetDriverVersion(char* out, unsigned size) { return text(ask("driver"), out, size); }
int nvmlSystemGetProcessName(unsigned pid, char* out, unsigned size) {
  return text(ask("process." + std::to_string(pid)), out, size);
}

int nvmlDeviceGetCount_v2(unsigned* out) { return number(ask("count"), out); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* out) {
  unsigned count = 0;
  if (int code = nvmlDeviceGetCount_v2(&count)) return code;
  if (index >= count) return INVALID_ARGUMENT;
  *out = index + 1;
  Answer answer = of_gpu(*out, "handle");
  return answer.code == NOT_SUPPORTED ? SUCCESS : answer.code;
}

int nvmlDeviceGetName(Device gpu, char* out, unsigned size) { return text(of_gpu(gpu, "name"), out, size); }
int nvmlDeviceGetUUID(Device gpu, char* out, unsigned size) {
  Answer answer = of_gpu(gpu, "uuid");
  char made[64];
  std::snprintf(made, sizeof made, "GPU-00000000-0000-0000-0000-%012ld", static_cast<long>(gpu - 1));
  return text(answer.code == NOT_SUPPORTED ? Answer{SUCCESS, made} : answer, out, size);
}
int nvmlDeviceGetCudaComputeCapability(Device gpu, int* major, int* minor) {
  Answer answer = of_gpu(gpu, "capability");
  std::istringstream(answer.text) >> *major >> *minor;
  return answer.code;
}
int nvmlDeviceGetPciInfo_v3(Device gpu, Pci* out) {
  *out = {};
  return text({SUCCESS, address(gpu)}, out->address, sizeof out->address);
}
int nvmlDeviceGetMemoryInfo(Device gpu, Memory* out) {
  int code = number(of_gpu(gpu, "memory.total"), &out->total);
  code = code ? code : number(of_gpu(gpu, "memory.used"), &out->used);
  out->free = out->total - out->used;
  return code;
}
int nvmlDeviceGetMemoryInfo_v2(Device gpu, Memory2* out) {
  Memory memory{};
  int code = nvmlDeviceGetMemoryInfo(gpu, &memory);
  out->total = memory.total, out->reserved = 0, out->free = memory.free, out->used = memory.used;
  return code;
}
int nvmlDeviceGetMaxPcieLinkGeneration(Device gpu, unsigned* out) { return number(of_gpu(gpu, "pcie.generation"), out); }
int nvmlDeviceGetCurrPcieLinkWidth(Device gpu, unsigned* out) { return number(of_gpu(gpu, "pcie.width"), out); }
int nvmlDeviceGetMaxPcieLinkWidth(Device gpu, unsigned* out) { return number(of_gpu(gpu, "pcie.width.max"), out); }

int nvmlDeviceGetUtilizationRates(Device gpu, Utilization* out) {
  out->memory = 0;
  return number(of_gpu(gpu, "busy"), &out->gpu);
}
int nvmlDeviceGetPowerUsage(Device gpu, unsigned* out) { return number(of_gpu(gpu, "power"), out); }
int nvmlDeviceGetEnforcedPowerLimit(Device gpu, unsigned* out) { return number(of_gpu(gpu, "power.limit"), out); }
int nvmlDeviceGetTemperature(Device gpu, int, unsigned* out) { return number(of_gpu(gpu, "temperature"), out); }
int nvmlDeviceGetClockInfo(Device gpu, int, unsigned* out) { return number(of_gpu(gpu, "clock"), out); }
int nvmlDeviceGetMaxClockInfo(Device gpu, int, unsigned* out) { return number(of_gpu(gpu, "clock.max"), out); }
int nvmlDeviceGetCurrentClocksEventReasons(Device gpu, unsigned long long* out) {
  return number(of_gpu(gpu, "clock.reasons"), out);
}
int nvmlDeviceGetTotalEccErrors(Device gpu, int kind, int, unsigned long long* out) {
  return number(of_gpu(gpu, kind == 1 ? "errors" : "errors.corrected"), out);
}
int nvmlDeviceGetRemappedRows(Device gpu, unsigned* corrected, unsigned* uncorrected, unsigned* pending, unsigned* failed) {
  Answer answer = of_gpu(gpu, "rows");
  std::istringstream(answer.text) >> *corrected >> *uncorrected >> *pending >> *failed;
  return answer.code;
}
int nvmlDeviceGetPcieThroughput(Device gpu, int direction, unsigned* out) {
  return number(of_gpu(gpu, direction ? "pcie.received" : "pcie.sent"), out);
}

// `xids` are a GPU's Xid errors, each of which is delivered once to an event set.
int nvmlEventSetCreate(std::intptr_t* out) {
  event_sets.push_back({0, 0});
  *out = static_cast<std::intptr_t>(event_sets.size());
  return SUCCESS;
}
int nvmlDeviceRegisterEvents(Device gpu, unsigned long long, std::intptr_t set) {
  event_sets.at(set - 1).gpu = gpu;
  return of_gpu(gpu, "xids").code;
}
int nvmlEventSetWait_v2(std::intptr_t set, Event* out, unsigned) {
  auto& [gpu, delivered] = event_sets.at(set - 1);
  std::istringstream words(of_gpu(gpu, "xids").text);
  *out = {gpu, 8, 0, 0, 0};
  for (unsigned i = 0; i <= delivered; ++i)
    if (!(words >> out->data)) return TIMEOUT;
  ++delivered;
  return SUCCESS;
}

// `processes` are their ids, each with a name at `process.<id>`.
int nvmlDeviceGetComputeRunningProcesses_v3(Device gpu, unsigned* count, Process* out) {
  Answer answer = of_gpu(gpu, "processes");
  if (answer.code) return answer.code;
  std::istringstream words(answer.text);
  unsigned found = 0, room = out ? *count : 0;
  for (unsigned pid; words >> pid; ++found)
    if (found < room) out[found] = {pid, 0, 0, 0};
  *count = found;
  return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

// Fields by number, at `field.<id>`.
int nvmlDeviceGetFieldValues(Device gpu, int count, Field* fields) {
  for (Field* one = fields; one != fields + count; ++one) {
    one->code = number(of_gpu(gpu, "field." + std::to_string(one->id)), &one->value);
  }
  return SUCCESS;
}

// `nvlinks` are the ends of the active ones: `switch`, or the index of a GPU.
static std::optional<Text> end_of(Device gpu, unsigned link) {
  std::istringstream words(of_gpu(gpu, "nvlinks").text);
  Text word;
  for (unsigned i = 0; i <= link; ++i)
    if (!(words >> word)) return {};
  return word;
}
int nvmlDeviceGetNvLinkState(Device gpu, unsigned link, unsigned* out) {
  *out = end_of(gpu, link).has_value();
  return *out ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(Device gpu, unsigned link, unsigned* out) {
  auto end = end_of(gpu, link);
  if (!end) return NOT_SUPPORTED;
  *out = *end == "switch" ? 2 : 0;
  return SUCCESS;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device gpu, unsigned link, Pci* out) {
  auto end = end_of(gpu, link);
  return end && *end != "switch" ? nvmlDeviceGetPciInfo_v3(std::stol(*end) + 1, out) : NOT_SUPPORTED;
}

int nvmlDeviceGetTopologyCommonAncestor(Device one, Device other, int* out) {
  return number(of_pair(one, other, "ancestor"), out);
}
int nvmlDeviceGetP2PStatus(Device one, Device other, int, int* out) { return number(of_pair(one, other, "peer"), out); }

}  // extern "C"
