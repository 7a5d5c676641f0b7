//! Calls a headrace server over gRPC, by stubs that `build.rs` generates from `protos/`.
//!
//!     ./build.sh && build/grpc [host:port]

mod channel;
#[allow(clippy::all, dead_code)]
mod inference {
    include!(concat!(env!("OUT_DIR"), "/inference.rs"));
}

use std::collections::HashMap;
use std::error::Error;
use std::time::Duration;

use channel::Channel;
use headrace_clients::ZERO;
use inference::model_infer_request::InferInputTensor;
use inference::model_metadata_response::TensorMetadata;
use inference::{
    InferTensorContents, ModelInferRequest, ModelInferResponse, ModelMetadataRequest,
    ServerMetadataRequest,
};

const PATIENCE: Duration = Duration::from_secs(10);

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn commas<T: ToString>(numbers: &[T]) -> String {
    numbers
        .iter()
        .map(T::to_string)
        .collect::<Vec<_>>()
        .join(",")
}

fn described(tensors: &[TensorMetadata]) -> String {
    let texts = tensors.iter().map(|tensor| {
        format!(
            "{} {} [{}]",
            tensor.name,
            tensor.datatype,
            commas(&tensor.shape)
        )
    });
    texts.collect::<Vec<_>>().join(" and ")
}

async fn metadata(channel: &Channel) -> Result<()> {
    let own = channel.server_metadata(&ServerMetadataRequest {}).await?;
    println!("server: {} {}", own.name, own.version);
    let request = ModelMetadataRequest {
        name: "digits".into(),
        ..Default::default()
    };
    let model = channel.model_metadata(&request).await?;
    println!(
        "digits: {} -> {}",
        described(&model.inputs),
        described(&model.outputs)
    );
    Ok(())
}

fn input(
    name: &str,
    datatype: &str,
    shape: &[i64],
    contents: Option<InferTensorContents>,
) -> InferInputTensor {
    InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.into(),
        contents,
        ..Default::default()
    }
}

/// The bytes of a response's outputs by name.
fn outputs(response: ModelInferResponse) -> HashMap<String, Vec<u8>> {
    let names = response.outputs.into_iter().map(|output| output.name);
    names.zip(response.raw_output_contents).collect()
}

fn integers(data: &[u8]) -> Vec<i32> {
    data.chunks_exact(4)
        .map(|four| i32::from_le_bytes(four.try_into().unwrap()))
        .collect()
}

/// Tensors as numbers in messages; responses are always raw.
async fn plain(channel: &Channel) -> Result<()> {
    let contents = |numbers| {
        Some(InferTensorContents {
            int_contents: numbers,
            ..Default::default()
        })
    };
    let request = ModelInferRequest {
        model_name: "simple".into(),
        id: "sums".into(),
        inputs: vec![
            input("INPUT0", "INT32", &[1, 16], contents((0..16).collect())),
            input("INPUT1", "INT32", &[1, 16], contents(vec![1; 16])),
        ],
        ..Default::default()
    };
    let raw = outputs(channel.model_infer(&request).await?);
    let (sums, differences) = (integers(&raw["OUTPUT0"]), integers(&raw["OUTPUT1"]));
    println!(
        "plain: sums {}, differences {}",
        commas(&sums),
        commas(&differences)
    );
    Ok(())
}

/// Tensors as little-endian bytes, which neither side converts.
async fn binary(channel: &Channel) -> Result<()> {
    let request = ModelInferRequest {
        model_name: "digits".into(),
        inputs: vec![input("image", "FP32", &[1, 8, 8], None)],
        raw_input_contents: vec![ZERO.iter().flat_map(|pixel| pixel.to_le_bytes()).collect()],
        ..Default::default()
    };
    let raw = outputs(channel.model_infer(&request).await?);
    let label = i64::from_le_bytes(raw["label"][..].try_into()?) as usize;
    let probability = f32::from_le_bytes(raw["probabilities"][4 * label..][..4].try_into()?);
    println!("binary: a {label}, probability {probability:.3}");
    Ok(())
}

/// Many responses to one request. Texts are bytes, each after its length in 4 bytes.
async fn stream(channel: &Channel) -> Result<()> {
    let mut story = String::from("The miller");
    let text = InferTensorContents {
        bytes_contents: vec![story.clone().into()],
        ..Default::default()
    };
    let count = InferTensorContents {
        int64_contents: vec![5],
        ..Default::default()
    };
    let request = ModelInferRequest {
        model_name: "storyteller".into(),
        inputs: vec![
            input("text_input", "BYTES", &[1], Some(text)),
            input("max_tokens", "INT64", &[1], Some(count)),
        ],
        ..Default::default()
    };
    let mut messages = channel.model_stream_infer(&request).await?;
    while let Some(message) = messages.next().await? {
        if !message.error_message.is_empty() {
            return Err(message.error_message.into());
        }
        let raw = outputs(message.infer_response.ok_or("a message without response")?);
        let text = &raw["text_output"];
        let size = u32::from_le_bytes(text[..4].try_into()?) as usize;
        story += std::str::from_utf8(&text[4..][..size])?;
    }
    println!("stream: {story}");
    Ok(())
}

async fn refused(channel: &Channel) -> Result<()> {
    let request = ModelInferRequest {
        model_name: "nosuch".into(),
        ..Default::default()
    };
    match channel.model_infer(&request).await {
        Ok(_) => Err("a model that there is not was run".into()),
        Err(status) if status.code == "NOT_FOUND" => {
            println!("refused: {status}");
            Ok(())
        }
        Err(status) => Err(status.into()),
    }
}

async fn run(channel: &Channel) -> Result<()> {
    metadata(channel).await?;
    plain(channel).await?;
    binary(channel).await?;
    stream(channel).await?;
    refused(channel).await
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let server = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "127.0.0.1:8001".into());
    let channel = Channel::new(server);
    let done = tokio::time::timeout(PATIENCE, run(&channel)).await;
    if let Err(error) = done.unwrap_or_else(|late| Err(late.into())) {
        eprintln!("{}: {error}", channel.server);
        std::process::exit(1);
    }
}
