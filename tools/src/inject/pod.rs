//! One pod: a sidecar put in, and taken out again.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::engine::{self, CommandChange};
use super::yaml::Node;
use super::{Copies, Options, sidecar};

const HASH_SEED: &str = "PYTHONHASHSEED";
const PYTHON_PATH: &str = "PYTHONPATH";

/// The state of a pod before, as far as its other parts do not say so.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct PodRecord {
    /// The engine's container.
    container: String,
    #[serde(default)]
    command: CommandChange,
    /// The image before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    image: Option<String>,
    /// Changed variables, and their values before.
    #[serde(default)]
    variables: BTreeMap<String, Option<String>>,
    /// Lists without items, before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    empty: Vec<String>,
}

/// A changed pod's record, and notes for its owner.
pub(super) struct Injected {
    pub(super) record: PodRecord,
    pub(super) notes: Vec<String>,
}

/// The place of vLLM's container; none if nothing in the pod runs vLLM.
pub(super) fn find_engine(pod: &Node, options: &Options) -> Result<Option<usize>, String> {
    let is_meant = |container: &Node| match &options.container {
        Some(name) => container.text_at(&["name"]) == Some(name),
        None => engine::runs_vllm(container),
    };
    let containers = pod.items_of("containers");
    let found: Vec<usize> = (0..containers.len()).filter(|place| is_meant(&containers[*place])).collect();
    if found.len() > 1 {
        let names: Vec<_> = found.iter().filter_map(|place| containers[*place].text_at(&["name"])).collect();
        return Err(format!(
            "several containers may run vLLM ({}): name the engine by --container NAME",
            names.join(", ")
        ));
    }
    Ok(found.first().copied())
}

/// Whether somebody else put a sidecar into the pod.
pub(super) fn has_sidecar(pod: &Node) -> bool {
    ["containers", "initContainers"].iter().any(|list| pod.named(list, sidecar::NAME).is_some())
}

/// Puts a sidecar into a pod with the engine at this place of its containers.
pub(super) fn inject_sidecar(pod: &mut Node, place: usize, options: &Options) -> Result<Injected, String> {
    let group = servable(pod, place, options)?.to_owned();
    for mount in &options.mount {
        if pod.named("volumes", &mount.volume).is_none() {
            return Err(format!(
                "--mount names the volume {}, which the pod does not have: add it to its volumes",
                mount.volume
            ));
        }
    }
    let mut container = pod.items_of("containers")[place].clone();
    let mut record = PodRecord {
        container: container.text_at(&["name"]).unwrap_or_default().to_owned(),
        ..PodRecord::default()
    };
    let mut notes = engine::stays_out(&container);
    let (command, note) = engine::configure_connector(&mut container, options)?;
    notes.extend(note);
    record.command = command;
    if let Some(image) = &options.engine_image {
        record.image = Some(container.text_at(&["image"]).unwrap_or_default().to_owned());
        container.set_string("image", image);
    }
    set_variables(&mut container, options, &mut record)?;
    let empty = &mut record.empty;
    extend(&mut container, "volumeMounts", sidecar::engine_mounts(options), false, empty)?;
    let claims = match options.copy {
        Copies::Engine => Vec::new(),
        Copies::Sidecar => claims(&container),
    };
    extend(pod, "initContainers", sidecar::init_containers(options, &group, &claims), true, empty)?;
    extend(pod, "volumes", sidecar::volumes(options), false, empty)?;
    if let Some(Node::List(containers)) = pod.get_mut("containers") {
        containers[place] = container;
    }
    Ok(Injected { record, notes })
}

/// Takes the sidecar out of a pod again.
pub(super) fn remove_sidecar(pod: &mut Node, record: &PodRecord) -> Result<(), String> {
    let is_ours = |item: &Node| item.text_at(&["name"]).is_some_and(|name| sidecar::NAMES.contains(&name));
    for list in ["initContainers", "volumes"] {
        retain(pod, list, &record.empty, |item| !is_ours(item));
    }
    let Some(Node::List(containers)) = pod.get_mut("containers") else {
        return Err("it has no containers".to_owned());
    };
    let found =
        containers.iter_mut().find(|container| container.text_at(&["name"]) == Some(&record.container));
    let container = found
        .ok_or_else(|| format!("it has no container {} any more: change it by hand", record.container))?;
    retain(container, "volumeMounts", &record.empty, |item| !is_ours(item));
    for (name, before) in &record.variables {
        match before {
            Some(value) => put_variable(container, name, value),
            None => retain(container, "env", &record.empty, |item| item.text_at(&["name"]) != Some(name)),
        }
    }
    engine::restore_command(container, &record.command)?;
    for list in ["command", "args"] {
        retain(container, list, &record.empty, |_| true);
    }
    match record.image.as_deref() {
        Some("") => drop(container.take_key("image")),
        Some(image) => container.set_string("image", image),
        None => {}
    }
    Ok(())
}

/// Keeps some items of a list; a list without items goes, unless it had none before.
fn retain(map: &mut Node, list: &str, empty: &[String], is_kept: impl Fn(&Node) -> bool) {
    let Some(Node::List(items)) = map.get_mut(list) else { return };
    items.retain(is_kept);
    if items.is_empty() && !empty.iter().any(|kept| kept == list) {
        map.take_key(list);
    }
}

/// Adds items to a list, in front of the others or behind them; `empty` gets the name of a list without items.
fn extend(
    map: &mut Node,
    key: &str,
    added: Vec<Node>,
    first: bool,
    empty: &mut Vec<String>,
) -> Result<(), String> {
    match map.get_mut(key) {
        Some(Node::List(items)) => {
            if items.is_empty() {
                empty.push(key.to_owned());
            }
            let place = if first { 0 } else { items.len() };
            items.splice(place..place, added);
        }
        Some(value) if !value.is_null() => return Err(format!("its {key} is no list: write one")),
        Some(_) => return Err(format!("its {key} has no value: leave it out")),
        None => map.set(key, Node::List(added)),
    }
    Ok(())
}

/// Sets the seed shared by all engines of a namespace, and the way to the connector.
fn set_variables(container: &mut Node, options: &Options, record: &mut PodRecord) -> Result<(), String> {
    let PodRecord { variables: before, empty, .. } = record;
    if container.named("env", HASH_SEED).is_none() {
        extend(container, "env", vec![sidecar::make_variable(HASH_SEED, Node::string("0"))], false, empty)?;
        before.insert(HASH_SEED.to_owned(), None);
    }
    if !options.brings_connector() {
        return Ok(());
    }
    match container.named("env", PYTHON_PATH) {
        None => {
            let value = Node::string(sidecar::CONNECTOR_FOLDER);
            extend(container, "env", vec![sidecar::make_variable(PYTHON_PATH, value)], false, empty)?;
            before.insert(PYTHON_PATH.to_owned(), None);
        }
        Some(variable) => {
            let old = variable.text_at(&["value"]).ok_or_else(|| {
                format!("its {PYTHON_PATH} comes from elsewhere: give it a value, or an image with Pillion's wheel by --engine-image")
            })?;
            let old = old.to_owned();
            put_variable(container, PYTHON_PATH, &format!("{}:{old}", sidecar::CONNECTOR_FOLDER));
            before.insert(PYTHON_PATH.to_owned(), Some(old));
        }
    }
    Ok(())
}

fn put_variable(container: &mut Node, name: &str, value: &str) {
    let Some(Node::List(variables)) = container.get_mut("env") else { return };
    if let Some(variable) = variables.iter_mut().find(|variable| variable.text_at(&["name"]) == Some(name)) {
        variable.set_string("value", value);
    }
}

fn claims(container: &Node) -> Vec<&str> {
    let claims = container.at(&["resources", "claims"]).map_or(&[][..], Node::items);
    claims.iter().filter_map(|claim| claim.text_at(&["name"])).collect()
}

/// The group of the engine's processes. An engine out of a sidecar's reach is refused.
fn servable<'a>(pod: &'a Node, place: usize, options: &Options) -> Result<&'a str, String> {
    let shares_node = pod.get("hostNetwork").is_some_and(Node::is_true);
    if shares_node && !options.peer.is_empty() && options.node_id.is_none() {
        return Err("with hostNetwork every pod of a node has the node's name: pass --node-id '$(POD_NAME)'"
            .to_owned());
    }
    let container = &pod.items_of("containers")[place];
    let name = container.text_at(&["name"]).unwrap_or_default();
    let of = |key: &str| {
        let own = container.at(&["securityContext", key]);
        own.or_else(|| pod.at(&["securityContext", key])).filter(|value| !value.is_null())
    };
    let group = of("runAsGroup").and_then(Node::text);
    match (of("runAsUser").and_then(Node::text), group) {
        (_, Some(group)) => Ok(group),
        (Some("0"), None) => Ok("0"),
        (Some(_), None) => Err(format!(
            "container {name} sets runAsUser without runAsGroup: set both, so that its group may connect to the sidecar"
        )),
        (None, None) if of("runAsNonRoot").is_some_and(Node::is_true) => Err(format!(
            "container {name} sets runAsNonRoot, so its user is that of the image: set runAsUser and runAsGroup, so that its \
             group may connect to the sidecar"
        )),
        (None, None) => Ok("0"),
    }
}
