//! Conversations of several turns stay at the engines with their beginnings, and engines get equal shares.

use std::collections::{HashMap, HashSet};
use std::io::BufReader;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::{Value, json};

use super::engine::{self, Asked, Engine, Manner};
use super::{FIRST, PARAMS, Router, said};

const ENGINES: usize = 4;
const CONVERSATIONS: usize = 48;
const AT_ONCE: usize = 16;
const TURNS: usize = 6;

/// The means by which a client names its session.
#[derive(Copy, Clone, Debug)]
enum Session {
    Unnamed,
    User,
}

/// A message with the conversation's number at the begin of its text.
fn message(role: &str, conversation: usize, turn: usize, bytes: usize) -> Value {
    let text = format!("{conversation} {turn} ").repeat(bytes / 4);
    json!({ "role": role, "content": format!("{role} {text}") })
}

/// One conversation: each turn has all messages before it.
fn converse(router: &Router, conversation: usize, session: Session) {
    // Every second one has the system prompt of all others.
    let mut messages = if conversation.is_multiple_of(2) {
        vec![json!({ "role": "system", "content": "s".repeat(8000) })]
    } else {
        vec![]
    };
    for turn in 0..TURNS {
        messages.push(message("user", conversation, turn, 1600));
        let mut request = json!({ "messages": messages, "max_tokens": 9 });
        if let Session::User = session {
            request["user"] = json!(format!("user {conversation}"));
            // The client shortens its earlier messages, so no beginning is equal.
            request["messages"][0]["content"] =
                json!(format!("user {conversation} {turn} {}", "a".repeat(2000)));
        }
        let sent = router.send("POST", "/v1/chat/completions", &request.to_string());
        let answer = engine::read(&mut BufReader::new(sent)).unwrap();
        assert!(answer.line.contains("200"), "{answer:?}");
        messages.push(message("assistant", conversation, turn, 400));
    }
}

/// The conversation and the turn of a request.
fn turn_of(asked: &Asked) -> (String, usize) {
    let messages = asked.json()["messages"].as_array().unwrap().clone();
    let last = messages.last().unwrap()["content"].as_str().unwrap().to_owned();
    (
        last.split(' ').nth(1).unwrap().to_owned(),
        messages.iter().filter(|each| each["role"] == "user").count(),
    )
}

/// The share of later turns at the engine of the turn before, and the requests of each engine.
fn kept(engines: &[Engine]) -> (f64, Vec<usize>) {
    let mut places = HashMap::new();
    for (place, engine) in engines.iter().enumerate() {
        places.extend(engine.asked().iter().map(|asked| (turn_of(asked), place)));
    }
    let later = places.iter().filter(|((_, turn), _)| *turn > 1);
    let stayed = later.filter(|((name, turn), place)| places.get(&(name.clone(), turn - 1)) == Some(place));
    let stayed = stayed.count() as f64 / (CONVERSATIONS * (TURNS - 1)) as f64;
    assert_eq!(places.len(), CONVERSATIONS * TURNS);
    (stayed, engines.iter().map(|engine| engine.asked().len()).collect())
}

/// The share of all bytes of prompts computed before by the same engine, message by message.
fn seen_before(engines: &[Engine]) -> f64 {
    let (mut seen, mut all) = (0, 0);
    for engine in engines {
        let mut beginnings = HashSet::new();
        for asked in engine.asked() {
            let mut beginning = String::new();
            for message in asked.json()["messages"].as_array().unwrap() {
                let text = message.to_string();
                beginning += &text;
                all += text.len();
                seen += if beginnings.insert(beginning.clone()) { 0 } else { text.len() };
            }
        }
    }
    seen as f64 / all as f64
}

fn play(session: Session) -> (Vec<Engine>, Vec<Engine>) {
    let usage = json!({ "prompt_tokens": 1500 });
    let computed = json!({ "choices": [{ "text": "x" }], "usage": usage, PARAMS: said() });
    let computed = Manner::Json(200, computed.to_string());
    let start = |manner: &Manner| (0..ENGINES).map(|_| Engine::start(manner.clone())).collect::<Vec<_>>();
    let (prefill, decode) = (start(&computed), start(&Manner::Json(200, "{}".into())));
    let urls = |engines: &[Engine]| engines.iter().map(Engine::url).collect::<Vec<_>>();
    let (prefill_urls, decode_urls) = (urls(&prefill), urls(&decode));
    let [prefill_urls, decode_urls] =
        [&prefill_urls, &decode_urls].map(|urls| urls.iter().map(String::as_str).collect::<Vec<_>>());
    // Each turn goes to both roles.
    let arguments = [FIRST, &["--min-remote-tokens", "1"]].concat();
    let router = Router::start(&prefill_urls, &decode_urls, &arguments);
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                let numbers = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
                numbers
                    .take_while(|number| *number < CONVERSATIONS)
                    .for_each(|number| converse(&router, number, session));
            });
        }
    });
    (prefill, decode)
}

fn assert_even(requests: &[usize]) {
    let average = (CONVERSATIONS * TURNS / ENGINES) as f64;
    let is_even = |count: &usize| (*count as f64 - average).abs() <= average / 4.0;
    assert!(requests.iter().all(is_even), "{requests:?}");
}

#[test]
fn turns_go_to_the_engines_of_the_turn_before_with_and_without_a_system_prompt() {
    let (prefill, decode) = play(Session::Unnamed);
    for engines in [&prefill, &decode] {
        let (stayed, requests) = kept(engines);
        assert!(stayed >= 0.95, "{stayed} {requests:?}");
        assert_even(&requests);
    }
    let seen = seen_before(&prefill);
    assert!(seen >= 0.75, "{seen}");
}

#[test]
fn turns_of_a_named_session_go_to_its_engines_whatever_they_say() {
    let (prefill, decode) = play(Session::User);
    for engines in [&prefill, &decode] {
        let (stayed, requests) = kept(engines);
        assert!(stayed >= 0.95, "{stayed} {requests:?}");
        assert_even(&requests);
    }
}
