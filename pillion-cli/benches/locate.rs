//! The time of the router's look for the blocks of a prompt of 100,000 tokens that one of four pods has.
//!
//! The pods are real sidecars on this host. The engines have no tokenizer: the time of a text is that of its way to the engine and
//! of the tokens back. The last line is one JSON object, with milliseconds.

#[path = "../tests/client/mod.rs"]
mod client;
#[path = "../tests/follow/engine.rs"]
mod engine;
#[path = "../tests/follow/pods.rs"]
mod pods;

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Duration;

use engine::ScriptedEngine;
use pods::{Pod, Router};
use serde_json::{Value, json};

const TOKENS: u32 = 100_000;
const REQUESTS: usize = 200;

/// The prompt with `number` other spaces or zeros: no request has the text of an earlier one, and all have its tokens.
fn request(number: usize, is_text: bool) -> String {
    let token = |(at, token): (usize, u32)| match (at < 16 && number >> at & 1 == 1, is_text) {
        (false, _) => token.to_string(),
        (true, true) => format!("0{token}"),
        (true, false) => format!(" {token}"),
    };
    let tokens: Vec<String> = (10..10 + TOKENS).enumerate().map(token).collect();
    let prompt =
        if is_text { format!("\"{}\"", tokens.join(" ")) } else { format!("[{}]", tokens.join(",")) };
    format!("{{\"max_tokens\":1,\"prompt\":{prompt}}}")
}

/// The median and the 99th percentile.
fn percentiles(mut times: Vec<f64>) -> Value {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    json!({ "p50": at(0.5), "p99": at(0.99) })
}

#[expect(clippy::print_stdout, reason = "this is the result")]
fn main() {
    let pods: Vec<Pod> = (0..4).map(|number| Pod::new(format!("pod-{number}"))).collect();
    let sidecars: Vec<_> = pods.iter().map(|pod| pod.start(&pods, Some("both"))).collect();
    let each = pods.iter().zip(&sidecars).zip(1..);
    let engines: Vec<_> =
        each.map(|((pod, sidecar), run)| ScriptedEngine::start(pod.url_port, sidecar, run)).collect();
    let mut router = Router::start_logging(&pods, &["--access-log", "--log-format", "json"], Stdio::piped());
    let mut lines = BufReader::new(router.process.stdout.take().expect("a pipe")).lines();
    router.wait_members(4, 0, 4);
    router.wait_located(10..270);
    router.ask("POST", "/v1/completions", &request(0, false));
    // The filter has the saved blocks by then.
    std::thread::sleep(Duration::from_secs(1));
    let mut results = serde_json::Map::new();
    for is_text in [false, true] {
        let (mut all, mut parts) = (Vec::new(), [const { Vec::new() }; 3]);
        let begin = if is_text { 1 << 14 } else { 1 };
        for number in begin..begin + REQUESTS {
            assert_eq!(router.ask("POST", "/v1/completions", &request(number, is_text)).0, 200);
        }
        while all.len() < REQUESTS {
            let line: Value =
                serde_json::from_str(&lines.next().expect("a line").expect("text")).expect("JSON");
            let times = ["tokens_ms", "keys_ms", "probe_ms"].map(|part| line[part].as_f64());
            if let [Some(tokens), Some(keys), Some(probe)] = times
                && line["request_bytes"].as_u64() > Some(1000)
            {
                all.push(tokens + keys + probe);
                [tokens, keys, probe].into_iter().zip(&mut parts).for_each(|(time, part)| part.push(time));
            }
        }
        let [tokens, keys, probe] = parts.map(percentiles);
        let result = json!({ "all": percentiles(all), "tokens": tokens, "keys": keys, "probe": probe });
        results.insert(if is_text { "text" } else { "token_ids" }.into(), result);
    }
    let held = engines.iter().filter(|engine| engine.seen().len() > 2 * REQUESTS - 10).count();
    assert_eq!(held, 1, "one engine got all prompts");
    println!(
        "{}",
        json!({ "bench": "locate", "tokens": TOKENS, "requests": REQUESTS, "milliseconds": results })
    );
}
