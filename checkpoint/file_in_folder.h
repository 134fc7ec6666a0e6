// Files that an index names. Torch-free.
#pragma once

#include <string>

namespace ds::checkpoint {

// Whether `name` can only be that of a file in whatever folder it is looked for.
bool is_plain_file_name(const std::string& name);

// The path of the file `name` in `folder`: the name of a file and no path, and no link that leads to another folder. A
// checkpoint from elsewhere reaches no file of its reader. Links into the blobs of Hugging Face's cache, of which its
// folders of weights consist, are let through. Whether there is such a file is the caller's to say.
//
// Throws IoError that begins with `where`, which names the index.
std::string file_in_folder(const std::string& folder, const std::string& name, const std::string& where);

}  // namespace ds::checkpoint
