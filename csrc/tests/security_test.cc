// SPDX-License-Identifier: Apache-2.0
#include "security.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>

#include "check.h"
#include "envs.h"

namespace beast::test {
namespace {

Security files(const char* certificate, const char* key, const char* authority = "") {
  Security security;
  security.certificate_file = certificate;
  security.key_file = key;
  security.authority_file = authority;
  return security;
}

Security with_token(Security security = {}) {
  security.token = "secret";
  return security;
}

TEST(only_addresses_of_this_machine_are_local) {
  for (const char* address :
       {"unix:/tmp/a", "unix:a", "unix:///tmp/a", "unix-abstract:a", "localhost:0",
        "127.0.0.1:80", "127.1.2.3:80", "[::1]:80"}) {
    if (!is_local(address)) fail(__FILE__, __LINE__, address);
  }
  for (const char* address :
       {"", "0.0.0.0:80", "[::]:80", "192.168.1.1:80", "10.0.0.1:80", "*:80",
        "example.org:80", "localhost.example.org:80", "127.example.org:80",
        "127.0.0.1.example.org:80", "1127.0.0.1:80", "[::2]:80", "[::1].org:80",
        "unixx:80", "mylocalhost:80", "[fe80::1]:80"}) {
    if (is_local(address)) fail(__FILE__, __LINE__, address);
  }
}

TEST(addresses_are_sockets_or_hosts_with_a_port) {
  for (const char* address :
       {"unix:/tmp/a", "unix:a", "unix:///tmp/a", "unix-abstract:a", "localhost:0",
        "127.0.0.1:65535", "[::1]:80", "0.0.0.0:1", "example.org:50051"}) {
    check_address(address);
  }
  for (const char* address :
       {"", ":", ":80", "a", "a:", "a:b", "a:80b", "a:-1", "a: 80", "a:65536",
        "a:99999", "a:100000", "a:99999999999999999999", "/tmp/a", "localhost",
        "http://a:80/"}) {
    CHECK_THROWS(std::invalid_argument, check_address(address),
                 '"' + std::string(address) + "\" is neither unix:/path nor host:port");
  }
  CHECK_THROWS(std::invalid_argument, check_address("unix:"), "has no path");
  CHECK_THROWS(std::invalid_argument, check_address("unix://"), "has no path");
}

TEST(a_path_that_no_socket_can_have_is_refused) {
  check_address("unix:" + std::string(107, 'x'));
  check_address("unix://" + std::string(107, '/'));
  CHECK_THROWS(std::invalid_argument, check_address("unix:" + std::string(108, 'x')),
               "longer than a socket's path may be (107 characters)");
}

TEST(serving_beyond_this_machine_needs_tls_a_token_or_insecure) {
  Security none;
  for (const char* address : {"unix:/tmp/a", "127.0.0.1:0", "localhost:0", "[::1]:0"}) {
    check_server(address, none);
  }
  for (const char* address : {"0.0.0.0:0", "[::]:0", "10.0.0.1:80", "example.org:80"}) {
    LogCapture log;
    CHECK_THROWS(std::invalid_argument, check_server(address, none),
                 "refusing to serve on " + std::string(address));
    Security insecure;
    insecure.insecure = true;
    check_server(address, insecure);
    check_server(address, files("c", "k"));
    CHECK_EQ(log.text(), "");
    check_server(address, with_token());
    check_message(__FILE__, __LINE__, log.text(), "travels in clear text");
    CHECK(log.text().find("secret") == std::string::npos);
  }
}

TEST(a_token_on_this_machine_or_under_tls_needs_no_warning) {
  LogCapture log;
  check_server("unix:/tmp/a", with_token());
  check_server("0.0.0.0:0", with_token(files("c", "k")));
  CHECK_EQ(log.text(), "");
}

TEST(half_a_pair_of_certificate_and_key_is_refused) {
  for (const Security& half : {files("c", ""), files("", "k")}) {
    CHECK_THROWS(std::invalid_argument, check_server("unix:/tmp/a", half),
                 "belong together");
    CHECK_THROWS(std::invalid_argument, server_credentials(half), "belong together");
    CHECK_THROWS(std::invalid_argument, channel_credentials(half), "belong together");
  }
}

TEST(asking_for_certificates_needs_one_of_ones_own) {
  CHECK_THROWS(std::invalid_argument, check_server("unix:/tmp/a", files("", "", "ca")),
               "needs tls_cert and tls_key too");
  CHECK_THROWS(std::invalid_argument, channel_credentials(files("c", "k")),
               "need tls_ca");
}

TEST(files_that_cannot_be_read_are_named) {
  const Security security = files("/nowhere/c", "/nowhere/k", "/nowhere/ca");
  CHECK_THROWS(std::invalid_argument, server_credentials(security), "/nowhere/");
  CHECK_THROWS(std::invalid_argument, channel_credentials(security), "/nowhere/ca");
  CHECK_THROWS(std::invalid_argument, channel_credentials(files("", "", "/")),
               "cannot read the tls_ca file /");
}

TEST(without_files_the_connection_is_plain) {
  CHECK(server_credentials({}) != nullptr);
  CHECK(channel_credentials(with_token()) != nullptr);
}

TEST(only_bearer_and_the_token_is_authorized) {
  CHECK(is_authorized("Bearer secret", "secret"));
  for (const char* value : {"", "secret", "Bearer", "Bearer ", "Bearer secre",
                            "Bearer secrett", "Bearer  secret", "bearer secret",
                            "Bearer Secret", "Bearer secret ", "Basic  secret"}) {
    CHECK(!is_authorized(value, "secret"));
  }
  for (size_t i = 0; i < 13; ++i) {  // Every byte counts, and every bit of it.
    for (int bit = 0; bit < 8; ++bit) {
      std::string value = "Bearer secret";
      value[i] = static_cast<char>(value[i] ^ 1 << bit);
      CHECK(!is_authorized(value, "secret"));
    }
  }
  CHECK(!is_authorized({"Bearer secret\0", 14}, "secret"));
}

// A socket on which a process of that user listens, while this lives.
class Listener {
 public:
  Listener(const std::string& address, uid_t user) {
    const bool is_abstract = address.starts_with("unix-abstract:");
    const std::string path = address.substr(address.find(':') + 1);
    int ready[2];
    CHECK_EQ(pipe(ready), 0);
    child_ = fork();
    if (child_ == 0) {
      sockaddr_un name{};
      name.sun_family = AF_UNIX;
      std::memcpy(name.sun_path + is_abstract, path.data(), path.size());
      const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
      const auto size =
          static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
      if (setuid(user) != 0 ||
          bind(fd, reinterpret_cast<sockaddr*>(&name), size) != 0 ||
          listen(fd, 8) != 0 || write(ready[1], "r", 1) != 1) {
        _exit(1);
      }
      while (true) pause();
    }
    close(ready[1]);
    char byte = 0;
    CHECK_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
  }
  ~Listener() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }

 private:
  pid_t child_;
};

// Like /tmp, unless others may remove what is not theirs.
std::string open_to_all(const TempDir& dir, bool is_sticky = true) {
  const std::string path = dir.address("").substr(5);
  CHECK_EQ(chmod(path.c_str(), is_sticky ? 01777 : 0777), 0);
  return dir.address("env");
}

TEST(a_socket_of_ones_own_is_safe) {
  TempDir dir;
  CHECK(is_socket_safe("localhost:80"));
  for (const std::string& address :
       {open_to_all(dir), "unix-abstract:" + dir.address()}) {
    CHECK(!is_socket_safe(address));  // There is none.
    Listener listener(address, geteuid());
    CHECK(is_socket_safe(address));
  }
  CHECK(is_socket_safe("unix://" + dir.address().substr(5)));
}

TEST(a_socket_that_is_anothers_or_may_become_it_is_not_safe) {
  TempDir dir;
  const std::string address = open_to_all(dir), path = address.substr(5);
  if (geteuid() == 0) {  // Only root becomes another user.
    for (const std::string& other : {address, "unix-abstract:" + dir.address()}) {
      Listener listener(other, 12345);
      CHECK_THROWS(
          ConnectionError, is_socket_safe(other),
          other + ": the socket belongs to user 12345, so the token is not sent");
    }
    unlink(path.c_str());
  }
  Listener listener(address, geteuid());
  CHECK_EQ(symlink(path.c_str(), (path + ".link").c_str()), 0);
  CHECK_THROWS(ConnectionError, is_socket_safe(address + ".link"), "is not a socket");
  CHECK_THROWS(ConnectionError, is_socket_safe(address + "/more"), "Not a directory");
  open_to_all(dir, /*is_sticky=*/false);
  CHECK_THROWS(ConnectionError, is_socket_safe(address),
               "anybody may replace files in");
}

}  // namespace
}  // namespace beast::test
