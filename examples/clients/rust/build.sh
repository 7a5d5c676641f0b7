#!/usr/bin/env bash
# Builds both programs into FOLDER (build/ here), the second with stubs generated from protos/.
#
#   ./build.sh [FOLDER]
#
# The crates are Debian's, in /usr/share/cargo/registry. With those of a registry instead: `cargo build`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
to=$(mkdir -p "${1:-$here/build}" && cd "${1:-$here/build}" && pwd)
export PROTOS=$here/../../../protos

# From a folder of its own: cargo writes versions of crates beside Cargo.toml.
mkdir -p "$to/source"
ln -sfn "$here"/{Cargo.toml,build.rs,src} "$to/source"
cd "$to/source"
cargo build --offline --target-dir "$to/target" \
  --config 'source.crates-io.replace-with="debian"' \
  --config 'source.debian.directory="/usr/share/cargo/registry"'
ln -sfn target/debug/{http,grpc} "$to"
