//! gRPC on hyper's HTTP/2: each message after a byte and its length, the status in trailers.

use std::error::Error;
use std::fmt;
use std::marker::PhantomData;

use bytes::{Buf, BufMut, BytesMut};
use hyper::body::HttpBody;
use hyper::client::HttpConnector;
use hyper::{Body, HeaderMap, Request, StatusCode};
use prost::Message;

/// Bytes before a message: whether it is compressed, and its length in 4 bytes.
const PREFIX: usize = 5;
const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// How a call ended, by the name of its code.
#[derive(Debug)]
pub struct Status {
    pub code: &'static str,
    pub message: String,
}

impl Status {
    fn new(code: &'static str, message: impl ToString) -> Self {
        Status {
            code,
            message: message.to_string(),
        }
    }

    /// The status among headers or trailers, if it is there.
    fn found(fields: &HeaderMap) -> Option<Self> {
        let code = fields
            .get("grpc-status")?
            .to_str()
            .ok()?
            .parse::<usize>()
            .ok();
        let name = code
            .and_then(|code| CODES.get(code))
            .copied()
            .unwrap_or("UNKNOWN");
        let message = fields
            .get("grpc-message")
            .map_or(&b""[..], |value| value.as_bytes());
        Some(Status::new(name, unescaped(message)))
    }
}

impl fmt::Display for Status {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        write!(to, "{} {}", self.code, self.message)
    }
}

impl Error for Status {}

impl From<hyper::Error> for Status {
    fn from(error: hyper::Error) -> Self {
        Status::new("UNAVAILABLE", error)
    }
}

/// A text whose bytes other than printable ASCII were sent as `%` and two digits.
fn unescaped(text: &[u8]) -> String {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let [first, after @ ..] = rest {
        let digits = after
            .get(..2)
            .filter(|_| *first == b'%')
            .and_then(|two| std::str::from_utf8(two).ok());
        match digits.and_then(|two| u8::from_str_radix(two, 16).ok()) {
            Some(byte) => (bytes.push(byte), rest = &after[2..]),
            None => (bytes.push(*first), rest = after),
        };
    }
    String::from_utf8_lossy(&bytes).into()
}

/// A server, connected at the first call; `build.rs` adds the methods of the service.
pub struct Channel {
    pub server: String,
    http: hyper::Client<HttpConnector>,
}

impl Channel {
    pub fn new(server: String) -> Self {
        Channel {
            server,
            http: hyper::Client::builder().http2_only(true).build_http(),
        }
    }

    /// The one response of a call.
    pub async fn unary<Q: Message, A: Message + Default>(
        &self,
        path: &str,
        request: &Q,
    ) -> Result<A, Status> {
        let mut answers = self.stream(path, request).await?;
        let answer = answers
            .next()
            .await?
            .ok_or_else(|| Status::new("INTERNAL", "no response"))?;
        match answers.next().await? {
            None => Ok(answer),
            Some(_) => Err(Status::new("INTERNAL", "more than one response")),
        }
    }

    /// The responses to one request, as they arrive.
    pub async fn stream<Q: Message, A: Message + Default>(
        &self,
        path: &str,
        request: &Q,
    ) -> Result<Answers<A>, Status> {
        let mut message = BytesMut::new();
        message.put_u8(0);
        message.put_u32(request.encoded_len() as u32);
        message.put_slice(&request.encode_to_vec());
        let request = Request::post(format!("http://{}{path}", self.server))
            .header("Content-Type", "application/grpc")
            .header("TE", "trailers")
            .body(message.freeze().into())
            .map_err(|error| Status::new("INVALID_ARGUMENT", error))?;
        let answer = self.http.request(request).await?;
        match Status::found(answer.headers()) {
            Some(status) if status.code != "OK" => Err(status),
            _ if answer.status() != StatusCode::OK => Err(Status::new("UNKNOWN", answer.status())),
            _ => Ok(Answers {
                body: answer.into_body(),
                unread: BytesMut::new(),
                kind: PhantomData,
            }),
        }
    }
}

/// Responses of a call, the last of which is followed by its status.
pub struct Answers<A> {
    body: Body,
    unread: BytesMut,
    kind: PhantomData<A>,
}

impl<A: Message + Default> Answers<A> {
    /// The next response; None after a call that went well.
    pub async fn next(&mut self) -> Result<Option<A>, Status> {
        loop {
            if let Some(message) = self.message()? {
                return Ok(Some(message));
            }
            match self.body.data().await {
                Some(piece) => self.unread.put(piece?),
                None => break,
            }
        }
        match self.body.trailers().await?.as_ref().and_then(Status::found) {
            Some(status) if status.code != "OK" => Err(status),
            Some(_) if self.unread.is_empty() => Ok(None),
            _ => Err(Status::new("INTERNAL", "the response ended early")),
        }
    }

    /// The first message of what is unread, if all of it is there.
    fn message(&mut self) -> Result<Option<A>, Status> {
        if self.unread.len() < PREFIX {
            return Ok(None);
        }
        let mut prefix = &self.unread[..PREFIX];
        let (compressed, size) = (prefix.get_u8(), prefix.get_u32() as usize);
        if compressed != 0 {
            return Err(Status::new("UNIMPLEMENTED", "the response is compressed"));
        }
        if self.unread.len() < PREFIX + size {
            return Ok(None);
        }
        self.unread.advance(PREFIX);
        let decoded = A::decode(self.unread.split_to(size));
        decoded
            .map(Some)
            .map_err(|error| Status::new("INTERNAL", error))
    }
}
