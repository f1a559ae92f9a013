//! Libraries of NVIDIA that are looked for when they are used, and tables of their functions.

use std::ffi::c_void;

use ir::error::Problem;
use libloading::Library;

/// Whatever a library gives out to be given back: a communicator, stream, event, context or descriptor.
pub type Handle = *mut c_void;

/// Declares a table of a library's functions and how it is read.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($field:ident: $symbol:literal($($argument:ty),*) $(-> $result:ty)?,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[allow(missing_docs, reason = "a field is called like its function, which the library documents")]
        pub struct $table {
            $(pub $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $table {
            /// The functions of a library.
            #[allow(unsafe_code)]
            fn of(library: &libloading::Library) -> Result<$table, libloading::Error> {
                // SAFETY: the types are those of the libraries' headers, and the library is never unloaded.
                unsafe { Ok($table { $($field: *library.get($symbol)?,)* }) }
            }
        }
    };
}
pub(crate) use functions;

/// Functions of the first library that is there, which stays.
#[allow(unsafe_code)]
pub(crate) fn find<F>(
    what: &str,
    names: [&str; 2],
    help: &str,
    functions: fn(&Library) -> Result<F, libloading::Error>,
) -> Result<F, Problem> {
    let mut reason = String::new();
    for name in names {
        // SAFETY: loading runs the library's initialization, as linking with it would.
        match unsafe { Library::new(name) } {
            Err(error) => reason = in_words(&error),
            Ok(library) => {
                let found = functions(&library);
                std::mem::forget(library);
                return found
                    .map_err(|error| Problem::new(format!("a function is missing: {}", in_words(&error)), name, help));
            }
        }
    }
    Err(Problem::new(format!("{what} is not installed: {reason}"), names.join(", "), help))
}

/// An error as the system's linker explains it, which names the library or function.
fn in_words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
