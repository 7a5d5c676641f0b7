//! Generates messages and a stub from `protos/`, with protoc; PROTOS names another folder.

use std::env;
use std::fmt::Write;
use std::io::Result;
use std::path::PathBuf;

use prost_build::{Config, Service, ServiceGenerator};

/// Writes the methods of a service as methods of `Channel`.
struct Stub;

impl ServiceGenerator for Stub {
    fn generate(&mut self, service: Service, code: &mut String) {
        writeln!(code, "impl crate::channel::Channel {{").unwrap();
        for method in service.methods {
            let (shape, answer) = match method.server_streaming {
                true => (
                    "stream",
                    format!("crate::channel::Answers<{}>", method.output_type),
                ),
                false => ("unary", method.output_type),
            };
            writeln!(
                code,
                "pub async fn {}(&self, request: &{}) -> Result<{answer}, crate::channel::Status> \
                 {{ self.{shape}(\"/{}.{}/{}\", request).await }}",
                method.name,
                method.input_type,
                service.package,
                service.proto_name,
                method.proto_name,
            )
            .unwrap();
        }
        writeln!(code, "}}").unwrap();
    }
}

fn main() -> Result<()> {
    let protos = PathBuf::from(env::var("PROTOS").unwrap_or_else(|_| "../../../protos".into()));
    println!("cargo:rerun-if-env-changed=PROTOS");
    println!("cargo:rerun-if-changed={}", protos.display());
    Config::new()
        .service_generator(Box::new(Stub))
        .compile_protos(&[protos.join("grpc_service.proto")], &[protos])
}
