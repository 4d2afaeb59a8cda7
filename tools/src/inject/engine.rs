//! vLLM's container: the signs of it, and the connector on its command line.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::lists::{Lists, extend_list};
use super::yaml::Node;
use super::{CopySide, INJECT, InjectOptions, KvRole};

const CONNECTOR: &str = "PillionConnector";
const OPTION: &str = "--kv-transfer-config";
const MODULE: &str = "vllm.entrypoints.openai.api_server";
const SERVE: &str = "vllm serve";
/// Connectors with stores of their own. Beside one of them, a block is kept twice.
const STORES: [&str; 8] = [
    "FlexKVConnectorV1",
    "HF3FSKVConnector",
    "LMCacheConnectorV1",
    "LMCacheMPConnector",
    "MooncakeStoreConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "ExampleConnector",
];
/// Options of vLLM that keep Pillion out, as docs/support.md lists them, and the remedies. A value of 1 is no such option.
const STAYS_OUT: [(&str, &str); 11] = [
    ("--no-enable-prefix-caching", "start vLLM with --enable-prefix-caching"),
    ("--kv-offloading-size", "vLLM starts its own connector by it: leave it out"),
    ("--pipeline-parallel-size", "use --tensor-parallel-size alone"),
    ("--decode-context-parallel-size", "leave it out"),
    ("--prefill-context-parallel-size", "leave it out"),
    ("--nnodes", "run an engine for each node"),
    ("--enable-elastic-ep", "leave it out"),
    ("--ec-transfer-config", "leave it out"),
    ("--video-pruning-rate", "leave it out"),
    ("--calculate-kv-scales", "leave it out"),
    ("-pp", "use --tensor-parallel-size alone"),
];

/// The connector of a command line.
enum Configured {
    Nothing,
    /// This one, alone or among others.
    Pillion,
    /// Another one: the option's value, as it is written.
    Other(String),
}

/// A change of a command line: enough to take it back.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct CommandChange {
    /// A separate word, or a text within a script.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    added: Option<String>,
    /// The value of another connector's option: before, and after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    replaced: Option<[String; 2]>,
}

/// Returns true if a container looks like vLLM: by the last part of its image's name, or by its command line.
/// An organisation with vLLM in its name has other images, too.
pub(super) fn runs_vllm(container: &Node) -> bool {
    let image = container.text_at(&["image"]).unwrap_or_default();
    let name = image.rsplit_once('@').map_or(image, |(name, _)| name);
    let last = name.rsplit('/').next().unwrap_or_default();
    let words = list_words(container);
    last.contains("vllm")
        || program(&words).is_some()
        || words.iter().any(|word| !find_servers(word).is_empty())
}

/// The container's options that keep Pillion out, with their remedies.
pub(super) fn stays_out(container: &Node) -> Vec<String> {
    let stated = list_options(&list_words(container).join(" "));
    let found =
        STAYS_OUT.iter().filter(|(option, _)| option_values(&stated, option).any(|value| value != "1"));
    found.map(|(option, remedy)| format!("Pillion stays out beside {option}: {remedy}")).collect()
}

/// The words of a command line, with `-` for `_` as vLLM reads its options.
pub(super) fn list_options(line: &str) -> Vec<String> {
    let words = line.split([' ', '\t', '\n', '\\', '"', '\'']).filter(|word| !word.is_empty());
    words.map(|word| word.replace('_', "-")).collect()
}

/// The values of an option; the next word, or nothing, if it has none of its own.
pub(super) fn option_values<'a>(stated: &'a [String], option: &'a str) -> impl Iterator<Item = &'a str> {
    stated.iter().enumerate().filter_map(move |(place, word)| match word.strip_prefix(option)? {
        "" => Some(stated.get(place + 1).map_or("", String::as_str)),
        rest => rest.strip_prefix('='),
    })
}

/// The role of a connector on the command line; `None`: `pillion inject` adds it. Fails if it is unknown.
pub(super) fn stated_role(container: &Node) -> Result<Option<KvRole>, String> {
    let words = list_words(container);
    if !matches!(configured(&words)?, Configured::Pillion) {
        return Ok(None);
    }
    let named = |role: &KvRole| words.iter().any(|word| word.contains(role.name()));
    match &KvRole::value_variants().iter().copied().filter(named).collect::<Vec<_>>()[..] {
        [role] => Ok(Some(*role)),
        _ => Err("its connectors have no kv_role, or several".to_owned()),
    }
}

/// Puts the connector on the command line, if it is not there.
pub(super) fn configure_connector(
    container: &mut Node,
    options: &InjectOptions,
    lists: &mut Lists,
) -> Result<(CommandChange, Option<String>), String> {
    for key in ["command", "args"] {
        if container.get(key).is_some_and(|value| !matches!(value, Node::List(_)) && !value.is_null()) {
            return Err(format!("its {key} is no list: write one"));
        }
    }
    match configured(&list_words(container))? {
        Configured::Pillion => Ok((CommandChange::default(), None)),
        Configured::Other(value) => replace(container, &value, options),
        Configured::Nothing => {
            let added = add_connector(container, options, lists)?;
            Ok((CommandChange { added: Some(added), replaced: None }, None))
        }
    }
}

/// Refuses an engine without the connector in a pod with a sidecar.
pub(super) fn uses_sidecar(container: &Node) -> Result<(), String> {
    match configured(&list_words(container))? {
        Configured::Pillion => Ok(()),
        _ => {
            Err("a container pillion is there, and the engine does not use it: remove that container"
                .to_owned())
        }
    }
}

/// Takes a change of the command line back.
pub(super) fn restore_command(container: &mut Node, change: &CommandChange) -> Result<(), String> {
    if let Some([before, after]) = &change.replaced {
        substitute(container, after, before)?;
    }
    let Some(added) = &change.added else { return Ok(()) };
    let mut found = false;
    for key in ["command", "args"] {
        let Some(Node::List(items)) = container.get_mut(key) else { continue };
        let count = items.len();
        items.retain(|item| item.scalar_text() != Some(added));
        found |= items.len() < count;
        for item in items {
            if let Node::Scalar { text, .. } = item
                && text.contains(added)
            {
                *text = text.replace(added, "");
                found = true;
            }
        }
    }
    found.then_some(()).ok_or_else(|| changed_by_hand(added))
}

fn changed_by_hand(text: &str) -> String {
    format!("its command line has no {text} any more, which was added to it: change the manifest by hand")
}

/// Puts a text in place of another, in whichever word has it.
fn substitute(container: &mut Node, old: &str, new: &str) -> Result<(), String> {
    for key in ["command", "args"] {
        let Some(Node::List(items)) = container.get_mut(key) else { continue };
        for item in items {
            if let Node::Scalar { text, plain, .. } = item
                && text.contains(old)
            {
                *text = text.replacen(old, new, 1);
                *plain = false;
                return Ok(());
            }
        }
    }
    Err(changed_by_hand(old))
}

/// The texts of the command line, in order, without comments of scripts.
pub(super) fn list_words(container: &Node) -> Vec<String> {
    let lists = ["command", "args"].map(|key| container.items_of(key));
    lists.into_iter().flatten().filter_map(|item| item.scalar_text().map(uncommented)).collect()
}

/// A script with spaces in the place of its comments. Other texts stay as they are.
fn uncommented(text: &str) -> String {
    if !text.trim().contains(char::is_whitespace) {
        return text.to_owned();
    }
    let line = |line: &str| {
        let comment = match line.starts_with('#') {
            true => Some(0),
            false => line.find(" #").or_else(|| line.find("\t#")).map(|space| space + 1),
        };
        let code = &line[..comment.unwrap_or(line.len())];
        let end = if line.ends_with('\n') && comment.is_some() { "\n" } else { "" };
        format!("{code}{}{end}", " ".repeat(line.len() - code.len() - end.len()))
    };
    text.split_inclusive('\n').map(line).collect()
}

fn configured(words: &[String]) -> Result<Configured, String> {
    let Some(place) = words.iter().position(|word| word.replace('_', "-").contains(OPTION)) else {
        return Ok(Configured::Nothing);
    };
    if words.iter().any(|word| word.contains(CONNECTOR)) {
        return Ok(Configured::Pillion);
    }
    if words.iter().map(|word| word.replace('_', "-").matches(OPTION).count()).sum::<usize>() > 1 {
        return Err(format!("its command line has {OPTION} twice: keep one"));
    }
    let word = &words[place];
    let at = word.replace('_', "-").find(OPTION).unwrap_or_default() + OPTION.len();
    let rest = if at == word.len() { words.get(place + 1).map_or("", String::as_str) } else { &word[at..] };
    let begin =
        rest.find('{').filter(|begin| rest[..*begin].chars().all(|before| " ='\"\n\\".contains(before)));
    let value = begin.and_then(|begin| object(&rest[begin..]));
    let value = value.filter(|value| {
        serde_json::from_str::<Value>(value).is_ok_and(|value| value["kv_connector"].is_string())
    });
    value.map(|value| Configured::Other(value.to_owned())).ok_or_else(|| {
        format!("its {OPTION} is not a JSON object that names a kv_connector: write it as one, or remove it")
    })
}

/// The JSON object at the beginning of a text, up to its closing brace.
fn object(text: &str) -> Option<&str> {
    let (mut depth, mut quoted, mut escaped) = (0_usize, false, false);
    for (place, character) in text.char_indices() {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => quoted = !quoted,
            '{' if !quoted => depth += 1,
            '}' if !quoted => {
                depth -= 1;
                if depth == 0 {
                    return Some(&text[..=place]);
                }
            }
            _ => {}
        }
    }
    None
}

/// This connector's settings, as vLLM reads them.
fn settings(options: &InjectOptions, beside_another: bool) -> Value {
    let mut settings = json!({
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "pillion.connector",
        "kv_role": options.kv_role.name(),
    });
    if !beside_another {
        settings["kv_load_failure_policy"] = json!("recompute");
    }
    if options.copy == CopySide::Engine {
        settings["kv_connector_extra_config"] = json!({"pillion.copy": "engine"});
    }
    settings
}

/// Runs the connector beside another one, or in its place. Returns a note if both keep KV.
fn replace(
    container: &mut Node,
    value: &str,
    options: &InjectOptions,
) -> Result<(CommandChange, Option<String>), String> {
    let other: Value = serde_json::from_str(value).expect("it was read");
    let name = other["kv_connector"].as_str().unwrap_or_default().to_owned();
    let new = if options.replace_connector {
        settings(options, false)
    } else {
        let role = other.get("kv_role").cloned().unwrap_or_else(|| json!("kv_both"));
        let mut connectors = match name.as_str() {
            "MultiConnector" => {
                other["kv_connector_extra_config"]["connectors"].as_array().cloned().unwrap_or_default()
            }
            _ => vec![other],
        };
        connectors.push(settings(options, true));
        json!({
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": connectors},
        })
    };
    let new = new.to_string();
    substitute(container, value, &new)?;
    let note = (!options.replace_connector && STORES.contains(&name.as_str()))
        .then(|| format!("{name} keeps KV as Pillion does, so blocks are kept twice: --replace-connector puts Pillion in its place"));
    Ok((CommandChange { added: None, replaced: Some([value.to_owned(), new]) }, note))
}

/// Adds the connector to the command line, and returns the added text.
fn add_connector(container: &mut Node, options: &InjectOptions, lists: &mut Lists) -> Result<String, String> {
    let argument = format!("{OPTION}={}", settings(options, false));
    let words = list_words(container);
    if words.iter().any(|word| is_script(word)) {
        return Ok(into_scripts(container, options));
    }
    // Without a command, the image's own entry point is vLLM.
    let place = match program(&words) {
        Some(place) => place + 1,
        None if container.get("command").is_some_and(|command| !command.items().is_empty()) => {
            return Err(format!(
                "its command is not '{SERVE}' or '{MODULE}': add {OPTION} by hand, as docs/deploy.md shows, or give the object the \
                 annotation {INJECT}: 'false'"
            ));
        }
        None => usize::from(words.first().is_some_and(|word| word == "serve")),
    };
    let commands = container.items_of("command").len();
    let (key, place) = if place > 0 && place <= commands && program(&words).is_some() {
        ("command", place)
    } else {
        ("args", place - commands)
    };
    extend_list(container, key, vec![Node::string(&argument)], place, lists)?;
    Ok(argument)
}

/// The number of the word before vLLM's options; `None` if a shell is between.
fn program(words: &[String]) -> Option<usize> {
    let vllm = |text: &str| text == "vllm" || text.ends_with("/vllm");
    let served =
        words.windows(2).position(|pair| vllm(&pair[0]) && pair[1] == "serve").map(|place| place + 1);
    served.or_else(|| words.iter().position(|word| word == MODULE))
}

/// Returns true if a word is itself a command line for a shell.
pub(super) fn is_script(text: &str) -> bool {
    text.trim().contains(char::is_whitespace) && !find_servers(text).is_empty()
}

/// The ends of all names of vLLM's server in a script, in order: whole words outside of comments.
pub(super) fn find_servers(text: &str) -> Vec<usize> {
    let text = uncommented(text);
    let ends = |end: usize| {
        text[end..].chars().next().is_none_or(|next| next.is_whitespace() || "\\\"';&|".contains(next))
    };
    let found = |program: &str| {
        text.match_indices(program)
            .map(|(at, _)| at + program.len())
            .filter(|end| ends(*end))
            .collect::<Vec<_>>()
    };
    let mut places = [SERVE, MODULE].map(found).concat();
    places.sort_unstable();
    places
}

/// Adds the connector behind each name of vLLM's server in scripts. No shell reads any character of the text as its own, in any
/// quotes.
fn into_scripts(container: &mut Node, options: &InjectOptions) -> String {
    let settings = [
        ("kv_connector", CONNECTOR),
        ("kv_connector_module_path", "pillion.connector"),
        ("kv_role", options.kv_role.name()),
        ("kv_load_failure_policy", "recompute"),
    ];
    let added: String = settings.iter().map(|(name, value)| format!(" {OPTION}.{name}={value}")).collect();
    for key in ["command", "args"] {
        let Some(Node::List(items)) = container.get_mut(key) else { continue };
        for item in items {
            let Node::Scalar { text, plain, .. } = item else { continue };
            if !is_script(text) {
                continue;
            }
            for end in find_servers(text).into_iter().rev() {
                text.insert_str(end, &added);
            }
            *plain = false;
        }
    }
    added
}
