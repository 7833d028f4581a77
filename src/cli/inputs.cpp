#include "inputs.h"

#include <anyflash/names.h>

#include <algorithm>
#include <filesystem>

#include "mapping.h"
#include "tensor_file.h"

namespace anyflash::cli {

namespace {

// Splits FILE.EXTENSION:ENTRY; the entry is empty if there is none, the file is empty if `where` names no file.
std::pair<std::string, std::string> split_file(const std::string& where) {
  for (const std::string extension : {".npy:", ".npz:", ".safetensors:"})
    if (const auto place = where.find(extension); place != std::string::npos && place > 0) {
      const auto colon = place + extension.size() - 1;
      return {where.substr(0, colon), where.substr(colon + 1)};
    }
  if (has_tensor_extension(where)) return {where, ""};
  return {"", where};
}

}  // namespace

Inputs::Inputs(std::vector<std::string> files, bool two_bytes_are_bfloat16)
    : two_bytes_are_bfloat16_(two_bytes_are_bfloat16) {
  for (const auto& path : files) {
    if (file_format(path) == FileFormat::npy)
      files_.push_back(
          {path, {std::filesystem::path(path).stem().string()}, read_tensor(path, "", two_bytes_are_bfloat16)});
    else files_.push_back({path, tensor_names(path), {}});
  }
}

void Inputs::assign(const std::string& name, const std::string& where) {
  if (where.empty()) fail(name + ": no file or entry is named");
  if (!assigned_.emplace(name, where).second) fail(name + ": named twice");
}

void Inputs::assign(const std::string& assignment) {
  const auto equals = assignment.find('=');
  if (equals == 0 || equals == std::string::npos)
    fail("--tensor: '" + assignment + "', expected NAME=FILE or NAME=FILE:ENTRY");
  assign(assignment.substr(0, equals), assignment.substr(equals + 1));
}

bool Inputs::names_file(const std::string& path) const {
  const auto same = [&](const std::string& file) {
    std::error_code missing;
    return std::filesystem::equivalent(file, path, missing);
  };
  const auto by_file = [&](const File& file) { return same(file.path); };
  const auto by_name = [&](const auto& assigned) { return same(split_file(assigned.second).first); };
  return std::any_of(files_.begin(), files_.end(), by_file) || std::any_of(assigned_.begin(), assigned_.end(), by_name);
}

void Inputs::hide(const std::string& name) {
  const auto known = names();
  if (assigned_.contains(name)) fail("--without: '" + name + "' is given by an option of its own; leave one out");
  if (!assigned_.contains(name) && std::find(known.begin(), known.end(), name) == known.end())
    fail("--without: no tensor '" + name + "' is given" + did_you_mean(name, known));
  hidden_.push_back(name);
}

Names Inputs::names() const {
  Names all;
  for (const auto& file : files_) all.insert(all.end(), file.names.begin(), file.names.end());
  return all;
}

std::optional<OwnedTensor> Inputs::find(const std::string& name) {
  if (std::find(hidden_.begin(), hidden_.end(), name) != hidden_.end()) return {};
  if (const auto found = read_.find(name); found != read_.end()) return found->second;
  return read_[name] = load(name);
}

OwnedTensor Inputs::get(const std::string& name, const std::string& option) {
  if (std::find(hidden_.begin(), hidden_.end(), name) != hidden_.end())
    fail(name + ": left out by --without, but the command needs it");
  if (auto tensor = find(name)) return *tensor;
  if (files_.empty()) fail(name + ": not given; use --input or " + option);
  std::string has;
  int more = 0;
  const auto known = names();
  for (const auto& entry : known)
    if (has.size() < 60) has += std::string(has.empty() ? "" : ", ").append(entry);
    else ++more;
  if (more > 0) has += " and " + std::to_string(more) + " more";
  fail(name + ": not in " + files_.front().path + (files_.size() > 1 ? " or the other input files" : "") +
       ", which has " + (has.empty() ? "no tensor" : has) + "; name it with " + option + did_you_mean(name, known));
}

void Inputs::refuse_unused(const Names& of_backward) const {
  Names used;
  for (const auto& [name, tensor] : read_) used.push_back(name);
  for (const auto& [name, where] : assigned_) {
    if (read_.contains(name)) continue;
    if (std::find(of_backward.begin(), of_backward.end(), name) != of_backward.end())
      fail(name + ": given without --backward, which uses it");
    fail(name + ": given, expected a tensor that the command or its rule uses" + did_you_mean(name, used));
  }
}

std::optional<OwnedTensor> Inputs::load(const std::string& name) {
  const auto assigned = assigned_.find(name);
  if (std::find(mapped_.begin(), mapped_.end(), name) != mapped_.end()) {
    if (assigned == assigned_.end()) return {};
    const auto [file, entry] = split_file(assigned->second);
    if (file.empty() || !entry.empty() || file_format(file) != FileFormat::npy)
      fail(name + ": expected a .npy file of its own, which can be mapped, with --memory-budget and a .npy output");
    return map_npy_file(file, two_bytes_are_bfloat16_);
  }
  if (assigned == assigned_.end()) return from_files(name);
  auto [file, entry] = split_file(assigned->second);
  if (file.empty()) {
    auto tensor = from_files(entry);
    if (!tensor) fail(name + ": '" + entry + "' is neither a .npy, .npz or .safetensors file nor in an input file");
    return tensor;
  }
  if (entry.empty() && file_format(file) != FileFormat::npy) entry = name;
  return read_tensor(file, entry, two_bytes_are_bfloat16_);
}

std::optional<OwnedTensor> Inputs::from_files(const std::string& entry) {
  const File* found = nullptr;
  for (const auto& file : files_) {
    if (std::find(file.names.begin(), file.names.end(), entry) == file.names.end()) continue;
    if (found) fail(entry + ": in both " + found->path + " and " + file.path);
    found = &file;
  }
  if (!found) return {};
  return found->only ? *found->only : read_tensor(found->path, entry, two_bytes_are_bfloat16_);
}

}  // namespace anyflash::cli
