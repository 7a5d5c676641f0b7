#!/usr/bin/env bash
# Compiles both programs into FOLDER (build/ here), the second with stubs generated from protos/.
#
#   ./build.sh [FOLDER]
#
# JARS is a folder with the libraries, which are linked into FOLDER/jars.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
protos=$here/../../../protos
to=${1:-$here/build}
jars=${JARS:-/usr/share/java}
plugin=$(command -v protoc-gen-grpc-java || command -v grpc_java_plugin || true)

mkdir -p "$to/protos" "$to/generated" "$to/classes" "$to/jars"
for name in failureaccess geronimo-annotation-1.3-spec grpc gson guava netty perfmark protobuf; do
  find -L "$jars" -maxdepth 1 -name "$name*.jar" -exec ln -sf -t "$to/jars" {} +
done
javac -nowarn -proc:none -cp "$to/jars/*" -d "$to/classes" "$here/Http.java" "$here/Zero.java"

# Java wants a package, and a file for each message: copies of the protos say so.
for name in grpc_service model_config; do
  sed '/^package inference;/a option java_package = "inference"; option java_multiple_files = true;' \
    "$protos/$name.proto" >"$to/protos/$name.proto"
done
protoc --proto_path="$to/protos" --java_out="$to/generated" \
  --plugin=protoc-gen-grpc-java="${plugin:?is not installed}" --grpc-java_out="$to/generated" \
  grpc_service.proto model_config.proto
javac -nowarn -proc:none -cp "$to/jars/*" -d "$to/classes" \
  "$here/Grpc.java" "$here/Zero.java" "$to"/generated/inference/*.java
