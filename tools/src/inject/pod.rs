//! One pod: a sidecar put in, and taken out again.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::engine::{self, CommandChange};
use super::lists::{LAST, Lists, extend_list, retain_items};
use super::yaml::Node;
use super::{CopySide, InjectOptions, address, sidecar};

const HASH_SEED: &str = "PYTHONHASHSEED";
const PYTHON_PATH: &str = "PYTHONPATH";

/// The state of a pod before the injection, as far as its other parts do not show it.
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
    /// Lists that existed without items.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    lists: Lists,
}

/// A changed pod's record, and notes for its owner.
pub(super) struct Injected {
    pub(super) record: PodRecord,
    pub(super) notes: Vec<String>,
}

/// The place of vLLM's container; none if nothing in the pod runs vLLM.
pub(super) fn find_engine(pod: &Node, options: &InjectOptions) -> Result<Option<usize>, String> {
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

/// Returns true if the pod has a sidecar of another origin.
pub(super) fn has_sidecar(pod: &Node) -> bool {
    ["containers", "initContainers"].iter().any(|list| pod.named_item(list, sidecar::NAME).is_some())
}

/// Puts a sidecar into a pod with the engine at this place of its containers.
pub(super) fn inject_sidecar(
    pod: &mut Node,
    place: usize,
    options: &InjectOptions,
) -> Result<Injected, String> {
    let group = servable(pod, place, options)?.to_owned();
    names_free(pod, place)?;
    for mount in &options.mount {
        if pod.named_item("volumes", &mount.volume).is_none() {
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
    if pod.get("resources").is_some_and(|resources| !resources.is_null()) {
        notes
            .push("its pod states resources of all containers together: add those of the sidecar".to_owned());
    }
    let announced = options.announces_engine().then(|| address::find_engine_url(&container, options));
    let engine_url = announced.and_then(|url| {
        url.map_err(|reason| {
            notes.push(format!(
                "routers of the mesh do not find this engine, since {reason}: pass -- \
                 '--engine-url=http://$(POD_IP):PORT=ROLE', with another host if its certificate needs one"
            ));
        })
        .ok()
    });
    let (command, note) = engine::configure_connector(&mut container, options, &mut record.lists)?;
    notes.extend(note);
    record.command = command;
    if let Some(image) = &options.engine_image {
        record.image = Some(container.text_at(&["image"]).unwrap_or_default().to_owned());
        container.set_string("image", image);
    }
    set_variables(&mut container, options, &mut record)?;
    let lists = &mut record.lists;
    extend_list(&mut container, "volumeMounts", sidecar::engine_mounts(options), LAST, lists)?;
    let claims = match options.copy {
        CopySide::Engine => Vec::new(),
        CopySide::Sidecar => claims(&container),
    };
    extend_list(
        pod,
        "initContainers",
        sidecar::init_containers(options, &group, &claims, engine_url.as_deref()),
        0,
        lists,
    )?;
    extend_list(pod, "volumes", sidecar::make_volumes(options), LAST, lists)?;
    if let Some(Node::List(containers)) = pod.get_mut("containers") {
        containers[place] = container;
    }
    Ok(Injected { record, notes })
}

/// Takes the sidecar out of a pod again.
pub(super) fn remove_sidecar(pod: &mut Node, record: &PodRecord) -> Result<(), String> {
    let is_ours = |item: &Node| item.text_at(&["name"]).is_some_and(|name| sidecar::NAMES.contains(&name));
    for list in ["initContainers", "volumes"] {
        retain_items(pod, list, &record.lists, |item| !is_ours(item));
    }
    let Some(Node::List(containers)) = pod.get_mut("containers") else {
        return Err("it has no containers".to_owned());
    };
    let found =
        containers.iter_mut().find(|container| container.text_at(&["name"]) == Some(&record.container));
    let container = found
        .ok_or_else(|| format!("it has no container {} any more: change it by hand", record.container))?;
    retain_items(container, "volumeMounts", &record.lists, |item| !is_ours(item));
    for (name, before) in &record.variables {
        match before {
            Some(value) => put_variable(container, name, value),
            None => {
                retain_items(container, "env", &record.lists, |item| item.text_at(&["name"]) != Some(name))
            }
        }
    }
    engine::restore_command(container, &record.command)?;
    for list in ["command", "args"] {
        retain_items(container, list, &record.lists, |_| true);
    }
    match record.image.as_deref() {
        Some("") => drop(container.take_key("image")),
        Some(image) => container.set_string("image", image),
        None => {}
    }
    Ok(())
}

/// Sets the seed shared by all engines of a namespace, and the way to the connector.
fn set_variables(
    container: &mut Node,
    options: &InjectOptions,
    record: &mut PodRecord,
) -> Result<(), String> {
    let PodRecord { variables: before, lists, .. } = record;
    for name in [HASH_SEED, PYTHON_PATH] {
        let variables = container.items_of("env").iter();
        if variables.filter(|variable| variable.text_at(&["name"]) == Some(name)).count() > 1 {
            return Err(format!("its env has {name} twice: keep one"));
        }
    }
    if container.named_item("env", HASH_SEED).is_none() {
        extend_list(
            container,
            "env",
            vec![sidecar::make_variable(HASH_SEED, Node::string("0"))],
            LAST,
            lists,
        )?;
        before.insert(HASH_SEED.to_owned(), None);
    }
    if !options.brings_connector() {
        return Ok(());
    }
    match container.named_item("env", PYTHON_PATH) {
        None => {
            let value = Node::string(sidecar::CONNECTOR_FOLDER);
            extend_list(container, "env", vec![sidecar::make_variable(PYTHON_PATH, value)], LAST, lists)?;
            before.insert(PYTHON_PATH.to_owned(), None);
        }
        Some(variable) => {
            let old = variable.text_at(&["value"]).ok_or_else(|| {
                format!("its {PYTHON_PATH} comes from elsewhere: give it a value, or an image with Pillion's wheel by --engine-image")
            })?;
            let old = old.to_owned();
            // An empty part is the folder in which the engine starts.
            let behind = if old.is_empty() { String::new() } else { format!(":{old}") };
            put_variable(container, PYTHON_PATH, &format!("{}{behind}", sidecar::CONNECTOR_FOLDER));
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

/// Refuses a pod with names or places of the sidecar, or with a container that others hide.
fn names_free(pod: &Node, place: usize) -> Result<(), String> {
    let containers = pod.items_of("containers");
    let name =
        containers[place].text_at(&["name"]).ok_or("a container has no name: give each container a name")?;
    if containers.iter().filter(|other| other.text_at(&["name"]) == Some(name)).count() > 1 {
        return Err(format!("several containers have the name {name}: name them differently"));
    }
    for list in ["containers", "initContainers", "volumes"] {
        if let Some(name) = sidecar::NAMES.iter().find(|name| pod.named_item(list, name).is_some()) {
            return Err(format!(
                "its {list} have a {name} that `pillion inject` did not add: remove it or rename it"
            ));
        }
    }
    let mut mounts =
        containers[place].items_of("volumeMounts").iter().filter_map(|mount| mount.text_at(&["mountPath"]));
    let is_ours = |path: &&str| {
        [sidecar::SOCKET_FOLDER, sidecar::CONNECTOR_FOLDER].contains(&path.trim_end_matches('/'))
    };
    match mounts.find(is_ours) {
        Some(path) => Err(format!(
            "its container {name} mounts a volume at {path}, the sidecar's place: mount it elsewhere"
        )),
        None => Ok(()),
    }
}

fn claims(container: &Node) -> Vec<&str> {
    let claims = container.at(&["resources", "claims"]).map_or(&[][..], Node::items);
    claims.iter().filter_map(|claim| claim.text_at(&["name"])).collect()
}

/// The group of the engine's processes. An engine out of a sidecar's reach is refused.
fn servable<'a>(pod: &'a Node, place: usize, options: &InjectOptions) -> Result<&'a str, String> {
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
    let group = of("runAsGroup").and_then(Node::scalar_text);
    let is_decimal = |group: &str| {
        group.bytes().all(|digit| digit.is_ascii_digit()) && (group == "0" || !group.starts_with('0'))
    };
    match (of("runAsUser").and_then(Node::scalar_text), group) {
        (_, Some(group)) if is_decimal(group) => Ok(group),
        (_, Some(group)) => Err(format!("its runAsGroup is {group}: write it as a decimal number")),
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
