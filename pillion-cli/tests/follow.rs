//! `pillion route` as an observer of a mesh: real sidecars, with servers in place of engines and real blocks.

mod client;
#[path = "follow/engine.rs"]
mod engine;

#[path = "follow/pods.rs"]
mod pods;

use client::sidecar::Sidecar;
use engine::{ScriptedEngine, Seen};
use pods::{Pod, Router};
use serde_json::{Value, json};

const PODS: usize = 4;
const CONVERSATIONS: u32 = 24;
/// Tokens of the system prompt of all conversations, of a turn, and of an answer.
const SYSTEM: u32 = 64;
const TURN: u32 = 192;
const ANSWER: u32 = 32;

/// A text of these tokens: the engines read each number as a token.
fn text(tokens: std::ops::Range<u32>) -> String {
    tokens.map(|token| token.to_string()).collect::<Vec<_>>().join(" ")
}

/// The request of a conversation's turn, from 1 on.
fn turn_request(conversation: u32, turn: u32) -> Value {
    let mut messages = vec![json!({ "role": "system", "content": text(0..SYSTEM) })];
    for part in 0..turn {
        let begin = 1_000_000 * (conversation + 1) + part * (TURN + ANSWER);
        if part > 0 {
            messages.push(json!({ "role": "assistant", "content": text(begin - ANSWER..begin) }));
        }
        messages.push(json!({ "role": "user", "content": text(begin..begin + TURN) }));
    }
    json!({ "model": "m", "messages": messages, "max_tokens": 1 })
}

/// Sends one turn of all conversations. Returns the found share of their turns before.
fn play_turn(turn: u32, routers: &[Router], engines: &[ScriptedEngine]) -> f64 {
    let before: Vec<usize> = engines.iter().map(|engine| engine.seen().len()).collect();
    for conversation in 0..CONVERSATIONS {
        let router = &routers[(conversation + turn) as usize % routers.len()];
        let request = turn_request(conversation, turn).to_string();
        let (status, body) = router.ask("POST", "/v1/chat/completions", &request);
        assert_eq!(status, 200, "{body}");
    }
    let seen = engines.iter().zip(before).flat_map(|(engine, before)| engine.seen()[before..].to_vec());
    let seen: Vec<Seen> = seen.collect();
    assert_eq!(seen.len(), CONVERSATIONS as usize);
    let found: u64 = seen.iter().map(|seen| seen.found).sum();
    // The tokens found by one pod with all turns before.
    let kept = if turn == 1 { SYSTEM } else { SYSTEM + (turn - 1) * TURN + (turn - 2) * ANSWER };
    found as f64 / f64::from(kept / 16 * 16 * CONVERSATIONS)
}

#[test]
fn after_a_restart_of_routers_and_engines_each_conversation_goes_where_its_blocks_lie() {
    let pods: Vec<Pod> = (0..PODS).map(|number| Pod::new(format!("pod-{number}"))).collect();
    let mut sidecars: Vec<Sidecar> = pods.iter().map(|pod| pod.start(&pods, Some("both"))).collect();
    let start_engines = |sidecars: &[Sidecar]| -> Vec<ScriptedEngine> {
        let each = pods.iter().zip(sidecars).zip(1..);
        each.map(|((pod, sidecar), run)| ScriptedEngine::start(pod.url_port, sidecar, run)).collect()
    };
    let mut engines = start_engines(&sidecars);
    let start_all = || {
        let routers: Vec<Router> = [(); 2].map(|()| Router::start(&pods, &[])).into();
        routers.iter().for_each(|router| router.wait_members(PODS as u64, 0, PODS as u64));
        routers
    };
    let mut routers = start_all();
    for turn in 1..=3 {
        let share = play_turn(turn, &routers, &engines);
        eprintln!("turn {turn}: {share:.4} of one pod that has all");
    }
    let requests: Vec<usize> = engines.iter().map(|engine| engine.seen().len()).collect();
    eprintln!("requests of each engine: {requests:?}");
    assert!(requests.iter().all(|count| *count >= 6), "{requests:?}");
    routers.clear();
    engines.clear();
    engines = start_engines(&sidecars);
    routers = start_all();
    routers.iter().for_each(|router| router.wait_located(0..256));
    engines.iter().for_each(ScriptedEngine::forget);
    let share = play_turn(4, &routers, &engines);
    eprintln!("after the restart of both routers and all engines: {share:.4} of one pod that has all");
    assert!(share >= 0.98, "{share}");
    assert!(routers[0].figure("pillion_route_prompts_total{way=\"plain\"} ") > 0);

    for sidecar in &sidecars {
        assert_eq!(sidecar.metric("pillion_mesh_peers"), PODS as u64 - 1, "no router is a member");
    }

    // Without the mesh, new routers know nothing of the conversations.
    let urls: Vec<String> = pods.iter().map(|pod| format!("--decode={}", pod.url())).collect();
    let listed: Vec<&str> = urls.iter().map(String::as_str).collect();
    let arguments = [&["--prefill", "http://127.0.0.1:9"], &listed[..]].concat();
    routers = [(); 2].map(|()| Router::start(&[], &arguments)).into();
    let share = play_turn(5, &routers, &engines);
    eprintln!("after a restart of both routers, without the mesh: {share:.4}");
    assert!(share < 0.9, "{share}");

    // A pod dies: its conversations are answered elsewhere, and the mesh forgets it.
    routers = start_all();
    drop(engines.pop());
    sidecars.pop().unwrap().kill();
    for conversation in 0..CONVERSATIONS {
        let request = turn_request(conversation, 6).to_string();
        let (status, body) = routers[0].ask("POST", "/v1/chat/completions", &request);
        assert_eq!(status, 200, "{body}");
    }
    routers[0].wait_members(PODS as u64 - 1, 0, PODS as u64 - 1);
    sidecars.into_iter().for_each(Sidecar::terminate);
}

#[test]
fn engines_have_the_roles_that_their_sidecars_announce_beside_listed_ones() {
    let pods: Vec<Pod> = (0..3).map(|number| Pod::new(format!("pod-{number}"))).collect();
    // The last sidecar announces no engine, as an older one.
    let roles = [Some("prefill"), Some("decode"), None];
    let sidecars: Vec<Sidecar> = pods.iter().zip(roles).map(|(pod, role)| pod.start(&pods, role)).collect();
    let engines: Vec<ScriptedEngine> = pods
        .iter()
        .zip(&sidecars)
        .zip(1..)
        .map(|((pod, sidecar), run)| ScriptedEngine::start(pod.url_port, sidecar, run))
        .collect();
    let prompt = |begin: u32| json!({ "prompt": (begin..begin + 300).collect::<Vec<_>>() }).to_string();
    let router = Router::start(&pods, &[]);
    router.wait_members(3, 1, 1);
    assert_eq!(router.ask("POST", "/v1/completions", &prompt(0)).0, 200);
    assert_eq!(router.figure("pillion_route_prompts_total{way=\"pair\"} "), 1);
    let seen = || engines.iter().map(|engine| engine.seen().len()).collect::<Vec<_>>();
    assert_eq!(seen(), [1, 1, 0]);
    // A listed engine stays beside announced ones, and counts once.
    let more = [format!("--decode={}", pods[2].url()), format!("--decode={}", pods[1].url())];
    let router = Router::start(&pods, &[&more[0], &more[1]]);
    router.wait_members(3, 1, 2);
    // Without any member a router asks its listed engines.
    let away = Pod::new("away".into());
    let router = Router::start(std::slice::from_ref(&away), &[&more[0]]);
    router.wait_members(0, 0, 1);
    assert_eq!(router.ask("POST", "/v1/completions", &prompt(1000)).0, 200);
    assert_eq!(seen()[2], 1);
    sidecars.into_iter().for_each(Sidecar::terminate);
}
