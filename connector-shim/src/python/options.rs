//! The connector's options for Python.

use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyString};
use shm_protocol::transport::default_socket;

use crate::core::options::{self, DefaultValue, EngineOption, GivenValue, OPTIONS, OptionError};

create_exception!(pillion._shim, ConfigError, PyValueError, "A wrong option. The text names the valid ones.");

/// Each option's name, its default in words, the rule of its values, and its meaning.
#[pyfunction]
pub(super) fn engine_options() -> Vec<(&'static str, String, String, &'static str)> {
    let told = |option: &EngineOption| {
        (option.name, option.default.to_string(), option.values.rule(), option.meaning)
    };
    OPTIONS.iter().map(told).collect()
}

/// The options among the keys of `kv_connector_extra_config`, without their prefix, and the defaults of the others.
#[pyfunction]
pub(super) fn read_options<'py>(py: Python<'py>, extra: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyDict>> {
    let read = PyDict::new(py);
    for option in &OPTIONS {
        match option.default {
            DefaultValue::AsServe => read.set_item(option.name, default_socket().into_os_string())?,
            DefaultValue::Absent => read.set_item(option.name, py.None())?,
            DefaultValue::Count(count) => read.set_item(option.name, count)?,
            DefaultValue::Text(text) => read.set_item(option.name, text)?,
            DefaultValue::Number(number) => {
                read.set_item(option.name, number.parse::<f64>().expect("a number"))?;
            }
        }
    }
    let mut given = Vec::new();
    for (key, value) in extra {
        if let Some(option) = options::check_key(&key.extract::<String>()?).map_err(config_error)? {
            given.push((option, value));
        }
    }
    for (option, value) in given {
        let shown = || value.repr().map_or_else(|_| "no value".to_owned(), |text| text.to_string());
        option.check_value(&given_value(&value), shown).map_err(config_error)?;
        read.set_item(option.name, value)?;
    }
    Ok(read)
}

fn given_value(value: &Bound<'_, PyAny>) -> GivenValue {
    if let Ok(text) = value.cast::<PyString>() {
        return GivenValue::Text(text.to_string());
    }
    if let Ok(number) = value.cast::<PyFloat>() {
        return GivenValue::Number(number.value());
    }
    let is_number = value.is_instance_of::<PyInt>() && !value.is_instance_of::<PyBool>();
    let count = is_number.then(|| value.extract().ok()).flatten();
    count.map_or(GivenValue::Other, GivenValue::Count)
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(super) fn config_error(error: OptionError) -> PyErr {
    ConfigError::new_err(error.to_string())
}
