// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>
#include <string_view>

namespace beast {

// How a connection is secured. Files are PEM; an empty string is "not given".
//
//   server: certificate + key     it proves who it is, the connection is encrypted
//   (TLS)
//           + authority           clients must show a certificate of it (mutual TLS)
//   client: authority             the server's certificate must come from it (TLS)
//           + certificate + key   shown to the server (mutual TLS)
//   both:   token                 a secret that the client shows; alone it travels in
//                                 clear text, which a warning says
struct Security {
  std::string certificate_file;
  std::string key_file;
  std::string authority_file;
  std::string token;
  std::string server_name;  // Client: the name in the certificate, if not the address.
  bool insecure = false;    // Server: listen beyond this machine without any of these.
};

// Whether only this machine can reach the address: unix:..., localhost:..., 127.x,
// [::1].
bool is_local(std::string_view address);

// All throw std::invalid_argument that says what to pass.
void check_address(std::string_view address);  // unix:/path or host:port.
void check_server(const std::string& address, const Security& security);
std::shared_ptr<grpc::ServerCredentials> server_credentials(const Security& security);
std::shared_ptr<grpc::ChannelCredentials> channel_credentials(const Security& security);

// Before a token is sent to the address. True where it is no unix socket, or one that
// this user or root listens on; false where there is no socket. Throws ConnectionError
// where it is another user's, or lies where another user may replace it.
bool is_socket_safe(const std::string& address);

// Whether the metadata value is "Bearer TOKEN"; takes as long for any value of a
// length.
bool is_authorized(std::string_view metadata_value, const std::string& token);

}  // namespace beast
