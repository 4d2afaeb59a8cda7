//! Engines on a sidecar of this process: KV saved by one is loaded by another, and every failure is a miss.

mod keeper;

use std::time::Duration;

use pillion::{
    ControlAddress, Engine, EngineError, Facts, HintAction, HintEnd, JoinOptions, LayerKv, Namespace,
};

use self::keeper::Keeper;

const SHARDS: u32 = 2;
const LAYERS: usize = 2;
const HEADS: usize = 4;
const BLOCK: usize = 4;
const DIM: usize = 8;
/// Five blocks and three tokens.
const TOKENS: u32 = 23;
const FULL: usize = TOKENS as usize / BLOCK;

type Kv = Vec<LayerKv<f32>>;

fn facts(changed: &[(&str, &str)]) -> Facts {
    let form = format!(
        "layers={LAYERS} tokens={BLOCK} kv_heads={} keys={DIM} values={DIM} dtype=float32 \
         k=kv_heads*64+keys*4+tokens v=32+kv_heads*64+tokens*8+values packing=none",
        HEADS / SHARDS as usize
    );
    let none_hash = "ab".repeat(32);
    let usual = [
        ("hash_algorithm", "sha256_cbor"),
        ("none_hash", &none_hash),
        ("extra_keys", "tagged"),
        ("block_tokens", "4"),
        ("weights", "some"),
        ("page_form", &form),
    ];
    usual.iter().chain(changed).map(|(name, value)| ((*name).into(), (*value).into())).collect()
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..TOKENS).map(|at| seed * 1000 + at).collect()
}

/// The KV of a prompt's tokens `first..end`, as the tests' model computes it: 1 + `off` times the right one.
fn kv(tokens: &[u32], first: usize, off: f32) -> Kv {
    let array = |layer: usize, value: bool| -> Vec<f32> {
        let head = move |head: usize| {
            let token = move |token: u32| {
                (0..DIM).map(move |at| {
                    let right = token as f32
                        + (layer * 100 + head * 10 + at) as f32 / 7.0
                        + f32::from(u8::from(value));
                    right * (1.0 + off)
                })
            };
            tokens[first..].iter().copied().flat_map(token)
        };
        (0..HEADS).flat_map(head).collect()
    };
    (0..LAYERS).map(|layer| LayerKv { k: array(layer, false), v: array(layer, true) }).collect()
}

/// An engine with facts of its own, and without checks.
fn own(keeper: &Keeper, name: &str) -> Engine {
    let namespace = Namespace::stated(facts(&[]), SHARDS).unwrap();
    let options = JoinOptions { check_every: 0, ..JoinOptions::new(name, 16) };
    Engine::join(&keeper.socket, &namespace, &options).unwrap()
}

fn joined(keeper: &Keeper, name: &str) -> Engine {
    let stated = Facts::from([("weights".into(), "some".into())]);
    let namespace = Namespace::find(&keeper.socket, &stated).unwrap();
    let options = JoinOptions { check_every: 0, ..JoinOptions::new(name, 16) };
    Engine::join(&keeper.socket, &namespace, &options).unwrap()
}

/// Loads, computes and saves a prompt. Returns the number of kept blocks, and of loaded tokens.
fn answer(engine: &Engine, tokens: &[u32], off: f32) -> (u64, usize) {
    let request = engine.load(tokens);
    let loaded = request.held();
    assert_eq!(engine.read::<f32>(&request).unwrap(), kv(&tokens[..loaded], 0, 0.0), "loaded KV is right");
    (engine.save(&request, tokens, &kv(tokens, loaded, off)).unwrap(), loaded)
}

#[test]
fn kv_saved_by_one_engine_is_loaded_by_another() {
    let keeper = Keeper::start();
    let (first, second) = (own(&keeper, "first"), own(&keeper, "second"));
    assert_eq!(answer(&first, &prompt(1), 0.0), (FULL as u64, 0));
    assert_eq!(second.kept(&prompt(1)), FULL * BLOCK);
    assert_eq!(answer(&second, &prompt(1), 0.0), (0, FULL * BLOCK));
    assert_eq!(second.kept(&prompt(2)), 0);
}

#[test]
fn hints_for_kept_blocks_say_how_they_ended() {
    let keeper = Keeper::start();
    let engine = own(&keeper, "first");
    assert_eq!(engine.hint(&prompt(1), HintAction::Pin, None).unwrap(), HintEnd::Missing);
    answer(&engine, &prompt(1), 0.0);
    for (action, seconds) in
        [(HintAction::Pin, Some(60)), (HintAction::Retain, None), (HintAction::Demote, None)]
    {
        assert_eq!(engine.hint(&prompt(1), action, seconds).unwrap(), HintEnd::Done, "{action}");
    }
    let refused = engine.hint(&prompt(1), HintAction::Pin, Some(0)).unwrap_err();
    assert_eq!(refused.to_string(), "pin for 0 seconds: pass 1 to 3600");
    assert_eq!(engine.kept(&prompt(1)), FULL * BLOCK, "nothing has gone");
}

/// A prompt of whole blocks: the logits of its last token are computed.
#[test]
fn the_last_token_is_left_to_compute() {
    let keeper = Keeper::start();
    let engine = own(&keeper, "engine");
    let whole = &prompt(1)[..FULL * BLOCK];
    assert_eq!(answer(&engine, whole, 0.0), (FULL as u64, 0));
    assert_eq!(engine.load(whole).held(), (FULL - 1) * BLOCK);
}

/// Token by token, as a decoder.
#[test]
fn an_answer_is_saved_in_any_parts() {
    let keeper = Keeper::start();
    let engine = own(&keeper, "engine");
    let tokens = prompt(1);
    let request = engine.load(&tokens[..5]);
    let mut kept = 0;
    for end in [5, 6, 7, 8, 13, 23] {
        kept += engine.save(&request, &tokens[..end], &kv(&tokens[..end], request.held(), 0.0)).unwrap();
        assert_eq!(request.held(), end);
    }
    assert_eq!(engine.read::<f32>(&request).unwrap(), kv(&tokens, 0, 0.0));
    assert_eq!(kept, FULL as u64);
    drop(request);
    assert_eq!(engine.load(&tokens).held(), FULL * BLOCK);
}

#[test]
fn wrong_arguments_are_refused_and_change_nothing() {
    let keeper = Keeper::start();
    let engine = own(&keeper, "engine");
    let (tokens, long) = (prompt(1), (0..100).collect::<Vec<u32>>());
    let request = engine.load(&tokens);
    let text = |result: Result<u64, EngineError>| result.unwrap_err().to_string();
    assert!(text(engine.save(&request, &prompt(2), &kv(&prompt(2), 0, 0.0))).contains("not those"));
    assert!(
        text(engine.save(&request, &tokens, &kv(&tokens, 1, 0.0)))
            .contains("other sizes than 2 layers of [4, 23, 8 and 8]")
    );
    assert!(text(engine.save(&request, &tokens, &[] as &[LayerKv<u16>])).contains("pages have float32"));
    let other = engine.load(&long);
    assert!(
        text(engine.save(&other, &long, &kv(&long, 0, 0.0))).contains("25 blocks are needed and 16 are free")
    );
    assert_eq!(engine.save(&request, &tokens, &kv(&tokens, 0, 0.0)).unwrap(), FULL as u64);
    assert!(text(engine.save(&request, &tokens[..4], &[] as &[LayerKv<f32>])).contains("other sizes"));
}

/// As much as there is room for.
#[test]
fn a_hit_is_as_long_as_there_is_room() {
    let keeper = Keeper::start();
    let first = own(&keeper, "first");
    answer(&first, &prompt(1), 0.0);
    let namespace = Namespace::stated(facts(&[]), SHARDS).unwrap();
    let options = JoinOptions { check_every: 0, ..JoinOptions::new("small", 3) };
    let small = Engine::join(&keeper.socket, &namespace, &options).unwrap();
    let request = small.load(&prompt(1));
    assert_eq!(request.held(), 3 * BLOCK);
    assert_eq!(small.load(&prompt(1)).held(), 0);
    drop(request);
    assert_eq!(small.load(&prompt(1)).held(), 3 * BLOCK, "its blocks are free again");
}

/// Rounding passes the comparison; 3 % does not.
#[test]
fn a_joining_engine_saves_once_it_has_proven_what_it_computes() {
    let keeper = Keeper::start();
    let first = own(&keeper, "first");
    answer(&first, &prompt(1), 0.0);
    let (right, wrong) = (joined(&keeper, "right"), joined(&keeper, "wrong"));
    drop(first);
    let longer: Vec<u32> = prompt(1).into_iter().chain(5000..5009).collect();
    assert_eq!(answer(&right, &longer, 0.0), (0, FULL * BLOCK), "it loads, and nothing it saves is kept");
    assert!(right.take_notices().iter().any(|text| text.contains("passed a KV check")));
    let compute = |off: f32| move |tokens: &[u32]| Ok::<_, EngineError>(kv(tokens, 0, off));
    assert!(!right.prove(&prompt(2), compute(0.0)).unwrap(), "its first block is not kept");
    assert!(right.prove(&prompt(1), compute(5e-7)).unwrap());
    let never = |_: &[u32]| -> Result<Kv, EngineError> { panic!("it was proven") };
    assert!(right.prove(&prompt(1), never).unwrap());
    assert_eq!(answer(&right, &longer, 0.0), (3, FULL * BLOCK));
    let error = wrong.prove(&prompt(1), compute(3e-2)).unwrap_err();
    assert!(error.to_string().contains("the namespace is closed to it"), "{error}");
    assert_eq!((wrong.load(&prompt(1)).held(), answer(&wrong, &prompt(3), 0.0)), (0, (0, 0)));
    assert_eq!(right.load(&longer).held(), 32 / BLOCK * BLOCK - usize::from(longer.len() == 32) * BLOCK);
}

/// The standing check: the first hit's last blocks are computed and compared, as a proof, too.
#[test]
fn the_first_hit_is_checked_and_proves_the_engine() {
    let keeper = Keeper::start();
    answer(&own(&keeper, "first"), &prompt(1), 0.0);
    let stated = Facts::from([("weights".into(), "some".into())]);
    let namespace = Namespace::find(&keeper.socket, &stated).unwrap();
    let engine = Engine::join(&keeper.socket, &namespace, &JoinOptions::new("engine", 16)).unwrap();
    assert_eq!(answer(&engine, &prompt(1), 0.0).1, 0, "64 tokens at most are computed");
    assert_eq!(answer(&engine, &prompt(1), 0.0).1, FULL * BLOCK);
    assert_eq!(answer(&engine, &prompt(2), 0.0), (FULL as u64, 0), "its blocks are kept");
}

#[test]
fn what_one_engine_promises_another_one_awaits() {
    let keeper = Keeper::start();
    let (produces, consumes) = (own(&keeper, "produces"), own(&keeper, "consumes"));
    let tokens = prompt(1);
    let request = produces.promise(&tokens);
    let (awaited, asked) = (tokens.clone(), std::sync::mpsc::channel());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            asked.0.send(()).unwrap();
            let loaded = consumes.load_awaited(&awaited);
            (loaded.held(), consumes.read::<f32>(&loaded).unwrap())
        });
        asked.1.recv().unwrap();
        std::thread::sleep(Duration::from_millis(300));
        for end in [8, 23] {
            produces.save(&request, &tokens[..end], &kv(&tokens[..end], request.held(), 0.0)).unwrap();
        }
        let (held, found) = waiting.join().unwrap();
        assert_eq!(held, TOKENS as usize - 1, "the prompt's partly full block, too");
        assert_eq!(found, kv(&tokens[..held], 0, 0.0));
    });
    drop(request);
    // The promise of this prompt is over.
    drop(produces.promise(&prompt(2)));
    assert_eq!(own(&keeper, "late").load_awaited(&prompt(2)).held(), 0);
}

#[test]
fn a_sidecar_started_again_costs_misses() {
    let keeper = Keeper::start();
    let engine = own(&keeper, "engine");
    assert_eq!(answer(&engine, &prompt(1), 0.0), (FULL as u64, 0));
    let keeper = keeper.restart(|| assert_eq!(answer(&engine, &prompt(1), 0.0), (0, 0)));
    keeper.watch("blocks are kept again", || answer(&engine, &prompt(1), 0.0).1 > 0);
    assert_eq!(engine.load(&prompt(1)).held(), FULL * BLOCK);
}

#[test]
fn the_one_namespace_that_agrees_is_found() {
    let keeper = Keeper::start();
    let find = |stated: &[(&str, &str)]| {
        let stated = stated.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Namespace::find(&keeper.socket, &stated)
    };
    assert!(find(&[]).unwrap_err().to_string().contains("let vLLM answer one prompt"));
    let join = |name: &str, changed: &[(&str, &str)]| {
        let namespace = Namespace::stated(facts(changed), SHARDS).unwrap();
        Engine::join(&keeper.socket, &namespace, &JoinOptions::new(name, 1)).unwrap()
    };
    let engines = [join("one", &[("dtype", "float32")]), join("other", &[("weights", "others")])];
    let found = find(&[("weights", "some"), ("dtype", "float32")]).unwrap();
    assert_eq!(
        (found.shards().unwrap(), found.block_tokens().unwrap(), found.pages().unwrap().len()),
        (2, BLOCK, 1)
    );
    assert_eq!(found.facts()["hash_algorithm"], "sha256_cbor");
    let none = find(&[("weights", "mine")]).unwrap_err();
    assert!(matches!(none, EngineError::NoNamespace(_)));
    assert!(
        none.to_string().contains("weights is 'mine' here and 'others' there: load the same weight files"),
        "{none}"
    );
    let several = find(&[]).unwrap_err();
    assert!(matches!(several, EngineError::SeveralNamespaces(_)));
    assert!(several.to_string().contains("state weights as well"), "{several}");
    assert_eq!(Namespace::list(&ControlAddress::beside(&keeper.socket)).unwrap().len(), engines.len());
    let absent = Namespace::find("/nowhere/pillion.sock", &Facts::new()).unwrap_err();
    assert!(absent.to_string().contains("--control-socket"), "{absent}");
    let absent = Engine::join("/nowhere/pillion.sock", &found, &JoinOptions::new("mine", 1)).unwrap_err();
    assert!(absent.to_string().contains("pillion serve --socket"), "{absent}");
}
