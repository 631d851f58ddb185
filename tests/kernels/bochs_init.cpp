// The first process of a machine that Bochs computes: runs what lies in /programs, one after another, and gives what they print to who started
// Bochs, which has a port for that and one that ends it.
#include <dirent.h>
#include <sys/io.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

namespace {

void write_to(unsigned short port, const std::string& text) {
  for (const char each : text) outb(static_cast<unsigned char>(each), port);
}

void tell(const std::string& text) { write_to(0xe9, text); }

void run(const std::string& name) {
  tell("== begin " + name + "\n");
  int ends[2];
  if (pipe(ends) != 0) return;
  std::string path = "/programs/" + name;
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 1), dup2(ends[1], 2), close(ends[0]), close(ends[1]);
    char* arguments[] = {path.data(), nullptr};
    execv(path.c_str(), arguments);
    _exit(127);
  }
  close(ends[1]);
  char part[4096];
  for (ssize_t size; (size = read(ends[0], part, sizeof part)) > 0;) tell(std::string(part, size));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  tell("== end " + std::to_string(status) + "\n");
}

}  // namespace

int main() {
  iopl(3);
  mount("proc", "/proc", "proc", 0, nullptr);
  DIR* const programs = opendir("/programs");
  while (const dirent* const entry = readdir(programs))
    if (entry->d_name[0] != '.') run(entry->d_name);
  write_to(0x8900, "Shutdown");
}
