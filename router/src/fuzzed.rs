//! Fuzz targets' access to the router's parsing of clients' requests and engines' streams.

use std::sync::Arc;

use http_body_util::BodyExt;
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, Method};
use serde_json::Value;

use super::api::RequestTarget;
use super::body::Payload;
use super::first_frames;
use super::forward::RouteRequest;
use super::requests::PARAMS;

/// The bodies for the two engines of a request with this path and body; `None` if the request is refused, or
/// goes to one engine.
///
/// # Panics
///
/// If a client's own parameters for connectors reach an engine.
pub fn read_request(path: &str, body: &[u8]) -> Option<[Value; 2]> {
    let headers: HeaderMap =
        [(CONTENT_TYPE, HeaderValue::from_static("application/json"))].into_iter().collect();
    let (method, path) = (Method::POST, path.to_owned());
    let (payload, trail, breaks, noted) =
        (Payload::default(), Arc::default(), Arc::default(), Arc::default());
    let target = RequestTarget::of_request(&method, &path);
    let asked = RouteRequest {
        method,
        path,
        target,
        headers,
        body: payload,
        trail,
        alone: None,
        passed: None,
        breaks,
        noted,
        _room: None,
    };
    let (_, prompt) = asked.parse_body(Bytes::copy_from_slice(body)).ok()?;
    let prompt = prompt?;
    // JSON of more levels than serde_json reads still goes to an engine.
    let read = |payload: Payload| serde_json::from_slice::<Value>(&payload.joined()).unwrap_or_default();
    let bodies = [read(prompt.prefill.payload()), read(prompt.fields.payload())];
    let names = |value: &Value| {
        value.as_object().into_iter().flat_map(|object| object.keys().cloned()).collect::<Vec<_>>()
    };
    let (params, own) = (names(&bodies[1][PARAMS]), names(&bodies[1][PARAMS]["pillion"]));
    let is_hint = |name: &String| ["last", "hints"].contains(&name.as_str());
    assert!(params.iter().all(|name| name == "pillion") && own.iter().all(is_hint), "{}", bodies[1]);
    assert!(bodies[0].is_null() || bodies[0][PARAMS]["do_remote_decode"] == true, "{}", bodies[0]);
    Some(bodies)
}

/// Returns true if a stream of events, in frames of `frame_bytes`, begins with an error.
///
/// # Panics
///
/// If the held frames and the rest are not the stream.
pub fn judge_stream(stream: &[u8], frame_bytes: usize) -> bool {
    let frames: Vec<_> = stream.chunks(frame_bytes.max(1)).map(Bytes::copy_from_slice).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        let mut body = Payload::from(frames).body();
        let first_frames = first_frames::read_first_frames(&mut body, true, first_frames::TIME_MAX)
            .await
            .expect("infallible");
        let mut held: Vec<u8> =
            first_frames.frames.into_iter().filter_map(|frame| frame.into_data().ok()).flatten().collect();
        held.extend_from_slice(&body.collect().await.expect("infallible").to_bytes());
        assert_eq!(held, stream);
        first_frames.given_up
    })
}
