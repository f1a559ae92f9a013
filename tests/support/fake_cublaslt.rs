//! cuBLASLt for tests on hosts without a card: "device" memory is this process's, a product is computed at once from
//! what the library was told, column-major as cuBLAS counts.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};

use half::bf16;
use runtime::cublaslt::{Algorithm, Found, Handle, LtFunctions};

thread_local! {
    /// What this thread's `cublasLtGetVersion` says.
    pub static SAID_VERSION: Cell<usize> = const { Cell::new(120_804) };
    /// Handles, descriptions and layouts that were made less those that were given back.
    pub static LIVING: Cell<i32> = const { Cell::new(0) };
    /// Times that the heuristic was asked.
    pub static ASKED: Cell<u32> = const { Cell::new(0) };
    /// Whether the heuristic finds something.
    pub static FINDS: Cell<bool> = const { Cell::new(true) };
    /// The result of the next product.
    pub static RESULT: Cell<c_uint> = const { Cell::new(0) };
    /// Alignments that were told last, of A, B, C and D.
    pub static ALIGNMENTS: RefCell<BTreeMap<c_uint, i64>> = const { RefCell::new(BTreeMap::new()) };
}

/// Attributes by number; a layout has its type, rows, columns and leading dimension under 0 and 2 to 4.
type Attributes = BTreeMap<c_uint, i64>;

/// All functions of the fake.
pub fn functions() -> LtFunctions {
    LtFunctions {
        get_version,
        create,
        destroy,
        description_create,
        description_set: set,
        description_destroy: destroy,
        layout_create,
        layout_set: set,
        layout_destroy: destroy,
        preference_create: create,
        preference_set: set,
        preference_destroy: destroy,
        heuristic,
        matmul,
    }
}

fn give(handle: *mut Handle, attributes: Attributes) -> c_uint {
    LIVING.set(LIVING.get() + 1);
    unsafe { *handle = Box::into_raw(Box::new(attributes)).cast() };
    0
}

unsafe fn of(handle: Handle) -> &'static mut Attributes {
    unsafe { &mut *handle.cast::<Attributes>() }
}

unsafe extern "C" fn get_version() -> usize {
    SAID_VERSION.get()
}

unsafe extern "C" fn create(handle: *mut Handle) -> c_uint {
    give(handle, Attributes::new())
}

unsafe extern "C" fn destroy(handle: Handle) -> c_uint {
    LIVING.set(LIVING.get() - 1);
    drop(unsafe { Box::from_raw(handle.cast::<Attributes>()) });
    0
}

unsafe extern "C" fn description_create(handle: *mut Handle, compute: c_uint, scale: c_uint) -> c_uint {
    assert_eq!((compute, scale), (68, 0), "sums and factors are fp32");
    give(handle, Attributes::new())
}

unsafe extern "C" fn layout_create(handle: *mut Handle, kind: c_uint, rows: u64, columns: u64, leading: i64) -> c_uint {
    give(handle, Attributes::from([(0, i64::from(kind)), (2, rows as i64), (3, columns as i64), (4, leading)]))
}

unsafe extern "C" fn set(handle: Handle, attribute: c_uint, value: *const c_void, bytes: usize) -> c_uint {
    let value = match bytes {
        4 => i64::from(unsafe { value.cast::<i32>().read() }),
        8 => unsafe { value.cast::<i64>().read() },
        _ => return 7,
    };
    unsafe { of(handle) }.insert(attribute, value);
    0
}

unsafe extern "C" fn heuristic(
    _: Handle,
    _: Handle,
    _: Handle,
    _: Handle,
    _: Handle,
    _: Handle,
    preference: Handle,
    requested: c_int,
    found: *mut Found,
    count: *mut c_int,
) -> c_uint {
    assert_eq!(requested, 1);
    ASKED.set(ASKED.get() + 1);
    let preference = unsafe { of(preference) };
    assert_eq!(preference[&1], 32 << 20);
    ALIGNMENTS.set(preference.clone());
    unsafe {
        *count = c_int::from(FINDS.get());
        (*found).algo = Algorithm { data: [7; 8] };
        (*found).workspaceSize = 4096;
    }
    if FINDS.get() { 0 } else { 15 }
}

/// Elements of a type of CUDA in memory: 0 is fp32, 14 bf16.
#[derive(Clone, Copy)]
struct Numbers {
    address: usize,
    kind: i64,
}

impl Numbers {
    fn get(self, at: i64) -> f32 {
        match self.kind {
            0 => unsafe { (self.address as *const f32).offset(at as isize).read() },
            _ => unsafe { (self.address as *const bf16).offset(at as isize).read() }.to_f32(),
        }
    }

    fn put(self, at: i64, number: f32) {
        match self.kind {
            0 => unsafe { (self.address as *mut f32).offset(at as isize).write(number) },
            _ => unsafe { (self.address as *mut bf16).offset(at as isize).write(bf16::from_f32(number)) },
        }
    }
}

/// The form with tanh.
pub fn gelu(x: f64) -> f64 {
    x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

/// Its derivative, from differences.
pub fn gelu_gradient(x: f64) -> f64 {
    (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5
}

unsafe extern "C" fn matmul(
    _: Handle,
    description: Handle,
    alpha: *const c_void,
    a: *const c_void,
    a_layout: Handle,
    b: *const c_void,
    b_layout: Handle,
    beta: *const c_void,
    c: *const c_void,
    _: Handle,
    d: *mut c_void,
    d_layout: Handle,
    algorithm: *const Algorithm,
    _: *mut c_void,
    workspace: usize,
    _: Handle,
) -> c_uint {
    assert_eq!(unsafe { *algorithm }, Algorithm { data: [7; 8] }, "the heuristic's algorithm");
    assert_eq!(workspace, 4096);
    let (description, alpha, beta) =
        unsafe { (of(description), alpha.cast::<f32>().read(), beta.cast::<f32>().read()) };
    let [left, right, result] = [a_layout, b_layout, d_layout].map(|layout| unsafe { of(layout) });
    let numbers = |address: *const c_void, layout: &Attributes| Numbers { address: address as usize, kind: layout[&0] };
    let (a, b, c, d) = (numbers(a, left), numbers(b, right), numbers(c, result), numbers(d, result));
    let epilogue = description[&7];
    let beside = |attribute| Numbers { address: *description.get(&attribute).unwrap_or(&0) as usize, kind: d.kind };
    let (bias, kept, kept_leading) = (beside(8), beside(11), *description.get(&12).unwrap_or(&0));
    let place = |layout: &Attributes, turned: i64, row: i64, column: i64, batch: i64| {
        let (row, column) = if turned == 1 { (column, row) } else { (row, column) };
        assert!(row < layout[&2] && column < layout[&3], "inside the layout");
        batch * layout.get(&6).unwrap_or(&0) + column * layout[&4] + row
    };
    let (turned_a, turned_b) = (description[&3], description[&4]);
    let summed = if turned_a == 1 { left[&2] } else { left[&3] };
    let mut sums = vec![0.0_f64; result[&2] as usize];
    for batch in 0..*result.get(&5).unwrap_or(&1) {
        for column in 0..result[&3] {
            for row in 0..result[&2] {
                let term = |inner| {
                    let (x, y) =
                        (place(left, turned_a, row, inner, batch), place(right, turned_b, inner, column, batch));
                    f64::from(a.get(x)) * f64::from(b.get(y))
                };
                let at = place(result, 0, row, column, batch);
                let mut number = f64::from(alpha) * (0..summed).map(term).sum::<f64>();
                if beta != 0.0 {
                    number += f64::from(beta) * f64::from(c.get(at));
                }
                if matches!(epilogue, 4 | 36 | 164) {
                    number += f64::from(bias.get(row));
                }
                if epilogue == 164 {
                    kept.put(column * kept_leading + row, number as f32);
                }
                if matches!(epilogue, 36 | 164) {
                    number = gelu(number);
                }
                if epilogue == 208 {
                    number *= gelu_gradient(f64::from(kept.get(column * kept_leading + row)));
                    sums[row as usize] += number;
                }
                d.put(at, number as f32);
            }
        }
    }
    if epilogue == 256 {
        for (row, sum) in sums.iter_mut().enumerate() {
            *sum = (0..summed).map(|inner| f64::from(a.get(place(left, turned_a, row as i64, inner, 0)))).sum();
        }
    }
    if matches!(epilogue, 208 | 256) {
        sums.iter().enumerate().for_each(|(row, sum)| bias.put(row as i64, *sum as f32));
    }
    RESULT.get()
}
