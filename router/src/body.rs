//! JSON of requests and answers, read in place: a value is a slice of its body, and no value becomes a tree.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, SizeHint};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::ser::Serialize;
use serde_json::value::RawValue;

/// The most fields of an object that the router writes again: vLLM's longest request has some 100. Each costs 120 bytes beside its
/// value.
const FIELDS_MAX: usize = 1024;
/// The most bytes of their names.
const NAMES_BYTES_MAX: usize = 64 << 10;
/// A shorter value is copied: a part of its own would cost more.
const PART_BYTES_MIN: usize = 4096;

/// The fields of a JSON object, each as the client wrote it. The last of two with one name counts, as for
/// Python.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Fields(BTreeMap<String, Bytes>);

/// A body to send: slices of the client's body, and the router's own bytes between them.
#[derive(Clone, Debug, Default)]
pub(super) struct Payload(Arc<Vec<Bytes>>);

/// A payload on its way to an engine.
#[derive(Debug)]
pub(super) struct PayloadBody {
    payload: Payload,
    next: usize,
}

// === impl Fields ===

impl Fields {
    /// The fields of the object in `json`. Fails for another value, malformed JSON or too many fields.
    pub(super) fn parse_object(json: &Bytes) -> serde_json::Result<Self> {
        let (mut fields, mut names_bytes) = (BTreeMap::new(), 0);
        let mut deserializer = serde_json::Deserializer::from_slice(json);
        deserializer.deserialize_map(Entries(|name: &str, value: &str| {
            names_bytes += name.len();
            if fields.len() >= FIELDS_MAX || names_bytes > NAMES_BYTES_MAX {
                return Err(format!(
                    "an object has more than {FIELDS_MAX} fields, or {NAMES_BYTES_MAX} bytes of names; send fewer"
                ));
            }
            fields.insert(name.to_owned(), json.slice_ref(value.as_bytes()));
            Ok(())
        }))?;
        deserializer.end()?;
        Ok(Self(fields))
    }

    /// The JSON of a field.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|value| str::from_utf8(value).expect("JSON that was read as UTF-8"))
    }

    /// The same as [`Self::get`], as a slice of the body.
    pub(super) fn get_bytes(&self, name: &str) -> Option<Bytes> {
        self.0.get(name).cloned()
    }

    /// Returns true if the field has another value than null or false.
    pub(super) fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| !matches!(value, "null" | "false"))
    }

    /// The fields of the object in a field; `None` without such a field, or if it has another value.
    pub(super) fn object(&self, name: &str) -> serde_json::Result<Option<Self>> {
        self.0.get(name).filter(|value| value.starts_with(b"{")).map(Self::parse_object).transpose()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.keys().map(|name| (name.as_str(), self.get(name).unwrap_or_default()))
    }

    pub(super) fn set_field(&mut self, name: &str, value: impl Serialize) {
        let json = serde_json::to_vec(&value).expect("the keys of every object here are texts");
        self.0.insert(name.to_owned(), json.into());
    }

    pub(super) fn set_object(&mut self, name: &str, object: &Self) {
        self.0.insert(name.to_owned(), object.payload().joined());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sets a field as it is written in another object; without it nothing changes.
    pub(super) fn copy_field(&mut self, name: &str, from: &Self) {
        if let Some(value) = from.0.get(name) {
            self.0.insert(name.to_owned(), value.clone());
        }
    }

    /// Removes a field, and returns its JSON.
    pub(super) fn take(&mut self, name: &str) -> Option<Bytes> {
        self.0.remove(name)
    }

    /// Removes a field; returns true where there was one.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        self.0.remove(name).is_some()
    }

    /// The object as bytes for an engine.
    pub(super) fn payload(&self) -> Payload {
        let (mut parts, mut open) = (Vec::new(), Vec::new());
        for (name, value) in &self.0 {
            open.push(if parts.is_empty() && open.is_empty() { b'{' } else { b',' });
            serde_json::to_writer(&mut open, name).expect("a text");
            open.push(b':');
            if value.len() < PART_BYTES_MIN {
                open.extend_from_slice(value);
            } else {
                parts.extend([std::mem::take(&mut open).into(), value.clone()]);
            }
        }
        if parts.is_empty() && open.is_empty() {
            open.push(b'{');
        }
        open.push(b'}');
        parts.push(open.into());
        Payload(Arc::new(parts))
    }
}

// === impl Payload ===

impl Payload {
    /// All parts as one piece: a copy if there are several.
    pub(super) fn joined(&self) -> Bytes {
        match self.0.as_slice() {
            [] => Bytes::new(),
            [part] => part.clone(),
            parts => parts.concat().into(),
        }
    }

    pub(super) fn body(&self) -> PayloadBody {
        PayloadBody { payload: self.clone(), next: 0 }
    }
}

impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Self {
        Self(Arc::new(if bytes.is_empty() { Vec::new() } else { vec![bytes] }))
    }
}

impl From<Vec<Bytes>> for Payload {
    fn from(parts: Vec<Bytes>) -> Self {
        Self(Arc::new(parts))
    }
}

// === impl PayloadBody ===

impl Body for PayloadBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let part = self.payload.0.get(self.next).cloned();
        self.next += 1;
        Poll::Ready(part.map(|part| Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.next >= self.payload.0.len()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.payload.0.iter().skip(self.next).map(|part| part.len() as u64).sum())
    }
}

/// Calls `each` with the JSON of every element of an array; returns false where `json` is no array.
pub(super) fn each_element<'a>(json: &'a str, each: impl FnMut(&'a str)) -> bool {
    serde_json::Deserializer::from_str(json).deserialize_seq(Elements(each)).is_ok()
}

/// Calls `each` with the name and the JSON of every entry of an object; returns false where `json` is no object.
pub(super) fn each_entry<'a>(json: &'a str, mut each: impl FnMut(&str, &'a str)) -> bool {
    let entries = Entries(|name: &str, value| {
        each(name, value);
        Ok(())
    });
    serde_json::Deserializer::from_str(json).deserialize_map(entries).is_ok()
}

/// The JSON of an object's entry.
pub(super) fn find_entry<'a>(json: &'a str, wanted: &str) -> Option<&'a str> {
    let mut found = None;
    each_entry(json, |name, value| {
        if name == wanted {
            found = Some(value);
        }
    });
    found
}

/// Bytes of the UTF-8 text of a JSON string, with its escapes decoded.
pub(super) fn text_bytes(json: &str) -> u64 {
    let json = json.as_bytes();
    let (mut rest, mut count) = (json.get(1..json.len().saturating_sub(1)).unwrap_or_default(), 0);
    while let Some(at) = rest.iter().position(|byte| *byte == b'\\') {
        let (escaped, used) = match rest.get(at + 1) {
            Some(b'u') => (unit_bytes(rest.get(at + 2..at + 6).unwrap_or_default()), 6),
            _ => (1, 2),
        };
        count += at as u64 + escaped;
        rest = rest.get(at + used..).unwrap_or_default();
    }
    count + rest.len() as u64
}

/// UTF-8 bytes of a UTF-16 unit in hexadecimal digits. Two surrogates make four.
fn unit_bytes(digits: &[u8]) -> u64 {
    let digits = str::from_utf8(digits).unwrap_or_default();
    match u16::from_str_radix(digits, 16).unwrap_or_default() {
        0..0x80 => 1,
        0x80..0x800 | 0xd800..0xe000 => 2,
        _ => 3,
    }
}

/// Reads the elements of an array.
struct Elements<F>(F);

/// Reads the entries of an object.
struct Entries<F>(F);

/// The name of an entry, copied only where it has escapes.
struct Name<'a>(Cow<'a, str>);

// === impl Elements ===

impl<'de, F: FnMut(&'de str)> Visitor<'de> for Elements<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut elements: A) -> Result<(), A::Error> {
        while let Some(element) = elements.next_element::<&RawValue>()? {
            (self.0)(element.get());
        }
        Ok(())
    }
}

// === impl Entries ===

impl<'de, F: FnMut(&str, &'de str) -> Result<(), String>> Visitor<'de> for Entries<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<(), A::Error> {
        while let Some((Name(name), value)) = entries.next_entry::<Name<'de>, &RawValue>()? {
            (self.0)(&name, value.get()).map_err(A::Error::custom)?;
        }
        Ok(())
    }
}

// === impl Name ===

impl<'de> Deserialize<'de> for Name<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Name<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_borrowed_str<E: Error>(self, name: &'de str) -> Result<Name<'de>, E> {
                Ok(Name(Cow::Borrowed(name)))
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<Name<'de>, E> {
                Ok(Name(Cow::Owned(name.to_owned())))
            }
        }
        deserializer.deserialize_str(Read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_slices_of_their_body_and_are_sent_as_they_were_written() {
        let long = format!("\"{}\"", "a".repeat(PART_BYTES_MIN));
        let body = Bytes::from(format!("{{ \"p\" : {long}, \"n\": 1.50, \"n\": 2e0, \"\\u0061\": [ 1 ] }}"));
        let mut fields = Fields::parse_object(&body).unwrap();
        assert_eq!((fields.get("n"), fields.get("a")), (Some("2e0"), Some("[ 1 ]")));
        assert_eq!(fields.get("p").unwrap().as_ptr(), body[8..].as_ptr(), "nothing is copied");
        fields.set_field("m", "x");
        let payload = fields.payload();
        assert_eq!(payload.joined(), format!("{{\"a\":[ 1 ],\"m\":\"x\",\"n\":2e0,\"p\":{long}}}"));
        assert_eq!(payload.body().size_hint().exact(), Some(payload.joined().len() as u64));
        assert_eq!(Fields::default().payload().joined(), "{}");
    }

    #[test]
    fn an_object_has_so_many_fields_and_names() {
        let object = |count: usize| {
            let fields: Vec<_> = (0..count).map(|at| format!("\"{at}\":0")).collect();
            Fields::parse_object(&format!("{{{}}}", fields.join(",")).into())
        };
        assert!(object(FIELDS_MAX).is_ok());
        assert!(object(FIELDS_MAX + 1).unwrap_err().to_string().contains("send fewer"));
        let name = "a".repeat(NAMES_BYTES_MAX + 1);
        Fields::parse_object(&format!("{{\"{name}\":0}}").into()).unwrap_err();
        for wrong in ["[]", "{", "{} {}", "{\"a\":NaN}", "{\"\\ud800\":0}"] {
            Fields::parse_object(&Bytes::from(wrong)).expect_err(wrong);
        }
    }

    #[test]
    fn a_text_has_the_bytes_that_it_stands_for() {
        for text in ["", "abc", "a\"\\\n", "é", "你好", "\u{1f600}x"] {
            let plain = serde_json::to_string(text).unwrap();
            let units: String = text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
            assert_eq!(text_bytes(&plain), text.len() as u64, "{plain}");
            assert_eq!(text_bytes(&format!("\"{units}\"")), text.len() as u64, "{units}");
        }
    }
}
