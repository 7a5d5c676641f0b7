//! Calls a headrace server over plain HTTP, with hyper and serde_json.
//!
//!     ./build.sh && build/http [host:port]

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use headrace_clients::ZERO;
use hyper::body::{self, HttpBody};
use hyper::client::HttpConnector;
use hyper::{Body, Request, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde::Deserialize;
use serde_json::{json, Value};

const PATIENCE: Duration = Duration::from_secs(10);
const HEADER_SIZE: &str = "Inference-Header-Content-Length";

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A request that the server refused.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        write!(to, "{} {}", self.status.as_u16(), self.reason)
    }
}

impl Error for Refusal {}

/// The server's own description.
#[derive(Deserialize)]
struct Server {
    name: String,
    version: String,
}

/// An input or output; without `data` its bytes follow the JSON.
#[derive(Deserialize)]
struct Tensor {
    name: String,
    datatype: String,
    shape: Vec<i64>,
    #[serde(default)]
    data: Vec<i32>,
    #[serde(default)]
    parameters: HashMap<String, usize>,
}

#[derive(Deserialize)]
struct Model {
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

#[derive(Deserialize)]
struct Inference {
    outputs: Vec<Tensor>,
}

/// A part of a stream.
#[derive(Deserialize)]
#[serde(untagged)]
enum Event {
    Failed { error: String },
    Told { text_output: String },
}

struct Client {
    server: String,
    http: hyper::Client<HttpConnector>,
}

impl Client {
    /// The response to a request; a `Refusal` unless it is answered with 200.
    async fn send(&self, request: Request<Body>) -> Result<Response<Body>> {
        let answer = self.http.request(request).await?;
        let status = answer.status();
        if status == StatusCode::OK {
            return Ok(answer);
        }
        let text = body::to_bytes(answer).await?;
        let reason = match serde_json::from_slice::<Value>(&text) {
            Ok(Value::Object(document)) => document
                .get("error")
                .and_then(Value::as_str)
                .map(String::from),
            _ => None,
        };
        // Without an error it is not the server's own: a proxy's page, for example.
        let reason = reason.unwrap_or_else(|| String::from_utf8_lossy(&text).into());
        Err(Refusal { status, reason }.into())
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let request = Request::get(format!("http://{}{path}", self.server)).body(Body::empty())?;
        let answer = body::to_bytes(self.send(request).await?).await?;
        Ok(serde_json::from_slice(&answer)?)
    }

    async fn post(&self, path: &str, document: Value) -> Result<Response<Body>> {
        let request = Request::post(format!("http://{}{path}", self.server))
            .header("Content-Type", "application/json")
            .body(document.to_string().into())?;
        self.send(request).await
    }

    async fn metadata(&self) -> Result<()> {
        let own: Server = self.get("/v2").await?;
        println!("server: {} {}", own.name, own.version);
        let model: Model = self.get("/v2/models/digits").await?;
        println!(
            "digits: {} -> {}",
            described(&model.inputs),
            described(&model.outputs)
        );
        Ok(())
    }

    /// Tensors as JSON: sums and differences of 16 integers.
    async fn plain(&self) -> Result<()> {
        let numbers: Vec<i32> = (0..16).collect();
        let document = json!({
            "id": "sums",
            "inputs": [
                {"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": numbers},
                {"name": "INPUT1", "datatype": "INT32", "shape": [1, 16], "data": vec![1; 16]},
            ],
        });
        let answer = body::to_bytes(self.post("/v2/models/simple/infer", document).await?).await?;
        let found: Inference = serde_json::from_slice(&answer)?;
        let texts: HashMap<_, _> = found
            .outputs
            .iter()
            .map(|output| (output.name.as_str(), commas(&output.data)))
            .collect();
        println!(
            "plain: sums {}, differences {}",
            texts["OUTPUT0"], texts["OUTPUT1"]
        );
        Ok(())
    }

    /// Tensors as little-endian bytes behind the JSON, in both directions.
    async fn binary(&self) -> Result<()> {
        let pixels: Vec<u8> = ZERO.iter().flat_map(|pixel| pixel.to_le_bytes()).collect();
        let document = json!({
            "inputs": [{
                "name": "image", "datatype": "FP32", "shape": [1, 8, 8],
                "parameters": {"binary_data_size": pixels.len()},
            }],
            "parameters": {"binary_data_output": true},
        })
        .to_string();
        let request = Request::post(format!("http://{}/v2/models/digits/infer", self.server))
            .header("Content-Type", "application/octet-stream")
            .header(HEADER_SIZE, document.len())
            .body([document.as_bytes(), &pixels].concat().into())?;
        let answer = self.send(request).await?;
        let size: usize = answer
            .headers()
            .get(HEADER_SIZE)
            .ok_or("no size of JSON")?
            .to_str()?
            .parse()?;
        let mut rest = body::to_bytes(answer).await?;
        if size > rest.len() {
            return Err(
                format!("{HEADER_SIZE} is {size} for a body of {} bytes", rest.len()).into(),
            );
        }
        let found: Inference = serde_json::from_slice(&rest.split_to(size))?;
        let mut data = HashMap::new();
        for output in &found.outputs {
            data.insert(
                output.name.as_str(),
                rest.split_to(output.parameters["binary_data_size"]),
            );
        }
        let label = i64::from_le_bytes(data["label"][..].try_into()?) as usize;
        let probability = f32::from_le_bytes(data["probabilities"][4 * label..][..4].try_into()?);
        println!("binary: a {label}, probability {probability:.3}");
        Ok(())
    }

    /// One server-sent event for each response.
    async fn stream(&self) -> Result<()> {
        let mut story = String::from("The miller");
        let document = json!({"text_input": story, "max_tokens": 5});
        let path = "/v2/models/storyteller/generate_stream";
        let mut answer = self.post(path, document).await?.into_body();
        let mut unread = Vec::new();
        while let Some(piece) = answer.data().await {
            unread.extend_from_slice(&piece?);
            while let Some(end) = unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = unread.drain(..=end).collect();
                // An empty line ends an event.
                if let Some(event) = line.strip_prefix(b"data:") {
                    match serde_json::from_slice(event)? {
                        Event::Failed { error } => return Err(error.into()),
                        Event::Told { text_output } => story += &text_output,
                    }
                }
            }
        }
        println!("stream: {story}");
        Ok(())
    }

    async fn refused(&self) -> Result<()> {
        match self
            .post("/v2/models/nosuch/infer", json!({"inputs": []}))
            .await
        {
            Ok(_) => Err("a model that there is not was run".into()),
            Err(error) => {
                println!("refused: {}", error.downcast::<Refusal>()?);
                Ok(())
            }
        }
    }

    async fn run(&self) -> Result<()> {
        self.metadata().await?;
        self.plain().await?;
        self.binary().await?;
        self.stream().await?;
        self.refused().await
    }
}

fn commas<T: ToString>(numbers: &[T]) -> String {
    numbers
        .iter()
        .map(T::to_string)
        .collect::<Vec<_>>()
        .join(",")
}

fn described(tensors: &[Tensor]) -> String {
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

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let server = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "127.0.0.1:8000".into());
    let client = Client {
        server,
        http: hyper::Client::new(),
    };
    let done = tokio::time::timeout(PATIENCE, client.run()).await;
    if let Err(error) = done.unwrap_or_else(|late| Err(late.into())) {
        eprintln!("{}: {error}", client.server);
        std::process::exit(1);
    }
}
