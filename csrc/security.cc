// SPDX-License-Identifier: Apache-2.0
#include "security.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "errors.h"
#include "log.h"

namespace beast {
namespace {

std::string read_file(const std::string& path, const char* what) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  // An empty authority would mean "whatever authorities the system trusts".
  if (!file || text.str().empty()) {
    throw std::invalid_argument("cannot read the " + std::string(what) + " file " +
                                path);
  }
  if (text.str().find("-----BEGIN ") == std::string::npos) {
    throw std::invalid_argument("the " + std::string(what) + " file " + path +
                                " holds no PEM (\"-----BEGIN ...\")");
  }
  return text.str();
}

bool has_pair(const Security& security) {
  if (security.certificate_file.empty() != security.key_file.empty()) {
    throw std::invalid_argument(
        "tls_cert and tls_key belong together; pass both or none");
  }
  return !security.certificate_file.empty();
}

constexpr std::string_view kUnix = "unix:", kAbstract = "unix-abstract:";

[[noreturn]] void refuse_token(const std::string& address, const std::string& why) {
  throw ConnectionError(address + ": " + why +
                        ", so the token is not sent; pass the address of a server of "
                        "yours, in a directory that only you can use");
}

void check_owner(const std::string& address, uid_t owner) {
  if (owner == geteuid() || owner == 0) return;
  refuse_token(address, "the socket belongs to user " + std::to_string(owner));
}

// The user that listens on the abstract socket, if there is one.
std::optional<uid_t> listener_of([[maybe_unused]] std::string_view name) {
#ifdef SO_PEERCRED
  sockaddr_un socket_name{};
  socket_name.sun_family = AF_UNIX;
  name = name.substr(0, sizeof(socket_name.sun_path) - 1);
  std::memcpy(socket_name.sun_path + 1, name.data(), name.size());
  const auto size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return std::nullopt;
  ucred peer{};
  socklen_t peer_size = sizeof(peer);
  const bool is_known =
      connect(fd, reinterpret_cast<sockaddr*>(&socket_name), size) == 0 &&
      getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &peer_size) == 0;
  close(fd);
  if (is_known) return peer.uid;
#endif
  return std::nullopt;
}

}  // namespace

bool is_local(std::string_view address) {
  if (address.starts_with(kUnix) || address.starts_with(kAbstract)) return true;
  const std::string host(address.substr(0, address.rfind(':')));
  in_addr parsed;  // 127.example.org is a name, not an address.
  const bool is_ipv4 = inet_pton(AF_INET, host.c_str(), &parsed) == 1;
  return host == "localhost" || host == "[::1]" ||
         (is_ipv4 && host.starts_with("127."));
}

void check_address(std::string_view address) {
  const std::string quoted = '"' + std::string(address) + '"';
  if (address.starts_with(kAbstract)) return;
  if (address.starts_with(kUnix)) {
    std::string_view path = address.substr(kUnix.size());
    if (path.starts_with("//")) path.remove_prefix(2);
    if (path.empty()) {
      throw std::invalid_argument("the address " + quoted +
                                  " has no path; pass unix:/path/of/the/socket");
    }
    if (path.size() >= sizeof(sockaddr_un::sun_path)) {
      throw std::invalid_argument(
          "the address " + quoted + " is longer than a socket's path may be (" +
          std::to_string(sizeof(sockaddr_un::sun_path) - 1) +
          " characters); use a shorter directory, such as /tmp");
    }
    return;
  }
  const size_t colon = address.rfind(':');
  const std::string_view port =
      colon == std::string_view::npos ? "" : address.substr(colon + 1);
  const bool digits = !port.empty() && port.size() <= 5 &&
                      port.find_first_not_of("0123456789") == std::string_view::npos;
  if (!digits || colon == 0 || std::stoi(std::string(port)) > 65535) {
    throw std::invalid_argument("the address " + quoted +
                                " is neither unix:/path nor host:port");
  }
}

void check_server(const std::string& address, const Security& security) {
  check_address(address);
  const bool tls = has_pair(security);
  if (!security.authority_file.empty() && !tls) {
    throw std::invalid_argument(
        "tls_ca asks clients for certificates, which needs tls_cert and tls_key too");
  }
  if (is_local(address) || tls) return;
  if (!security.token.empty()) {
    log(LogLevel::kWarning,
        "the token for " + address +
            " travels in clear text; pass tls_cert and tls_key to encrypt");
  } else if (!security.insecure) {
    throw std::invalid_argument(
        "refusing to serve on " + address +
        ", which other machines can reach, without tls_cert and tls_key or a token; "
        "pass one of them, or insecure=True (--insecure) on a network that you trust");
  }
}

std::shared_ptr<grpc::ServerCredentials> server_credentials(const Security& security) {
  if (!has_pair(security)) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions options;
  options.pem_key_cert_pairs.push_back(
      {read_file(security.key_file, "tls_key"),
       read_file(security.certificate_file, "tls_cert")});
  if (!security.authority_file.empty()) {
    options.pem_root_certs = read_file(security.authority_file, "tls_ca");
    options.client_certificate_request =
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
  }
  return grpc::SslServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> channel_credentials(
    const Security& security) {
  const bool pair = has_pair(security);
  if (security.authority_file.empty()) {
    if (pair) {
      throw std::invalid_argument(
          "tls_cert and tls_key need tls_ca, the authority of the server's "
          "certificate");
    }
    return grpc::InsecureChannelCredentials();
  }
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = read_file(security.authority_file, "tls_ca");
  if (pair) {
    options.pem_cert_chain = read_file(security.certificate_file, "tls_cert");
    options.pem_private_key = read_file(security.key_file, "tls_key");
  }
  return grpc::SslCredentials(options);
}

bool is_socket_safe(const std::string& address) {
  if (address.starts_with(kAbstract)) {
    const auto owner = listener_of(std::string_view(address).substr(kAbstract.size()));
    if (owner) check_owner(address, *owner);
    return owner.has_value();
  }
  if (!address.starts_with(kUnix)) return true;
  std::string path = address.substr(kUnix.size());
  if (path.starts_with("//")) path.erase(0, 2);
  struct stat found;
  if (lstat(path.c_str(), &found) != 0) {
    if (errno == ENOENT) return false;
    refuse_token(address, std::strerror(errno));
  }
  check_owner(address, found.st_uid);
  if (!S_ISSOCK(found.st_mode)) refuse_token(address, "the file is not a socket");
  const std::string directory = std::filesystem::absolute(path).parent_path().string();
  if (stat(directory.c_str(), &found) == 0 && (found.st_mode & S_IWOTH) != 0 &&
      (found.st_mode & S_ISVTX) == 0) {
    refuse_token(address, "anybody may replace files in " + directory);
  }
  return true;
}

bool is_authorized(std::string_view value, const std::string& token) {
  const std::string expected = "Bearer " + token;
  if (value.size() != expected.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < value.size(); ++i) difference |= value[i] ^ expected[i];
  return difference == 0;
}

}  // namespace beast
