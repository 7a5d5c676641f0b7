#!/usr/bin/env bash
# Builds both programs into FOLDER (build/ here), the second with stubs generated from protos/.
#
#   ./build.sh [FOLDER]
#
# The libraries are Debian's, in /usr/share/gocode. With modules instead: generate stubs into inference/
# by protoc-gen-go and protoc-gen-go-grpc, then `go mod tidy && go build ./...`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
protos=$here/../../../protos
to=$(mkdir -p "${1:-$here/build}" && cd "${1:-$here/build}" && pwd)
package=headrace.example/clients
source=$to/source/src/$package

mkdir -p "$source/inference"
for folder in http grpc zero; do
  ln -sfn "$here/$folder" "$source/$folder"
done
export GO111MODULE=off GOFLAGS=-buildvcs=false GOPATH="$to/source:/usr/share/gocode"
go build -o "$to/http" "$package/http"

# Debian's grpc is built on version 1.3 of golang/protobuf; its plugin makes stubs as well.
plugin=$(command -v protoc-gen-go-1-3 || command -v protoc-gen-go)
map=Mgrpc_service.proto=$package/inference,Mmodel_config.proto=$package/inference
protoc --proto_path="$protos" --plugin=protoc-gen-go="$plugin" \
  --go_out="plugins=grpc,paths=source_relative,$map:$source/inference" \
  grpc_service.proto model_config.proto
go build -o "$to/grpc" "$package/grpc"
