use warploom::moe::capacity;
use warploom::{Device, Error, Graph, Stream, Tensor, reference};
use warploom_tests::{noise, on_every_device, property};

fn check(d: &Device, s: &Stream, ids: &[i32], choices: usize, experts: usize, wanted: usize, limit: usize) {
    let tokens = ids.len() / choices;
    let want = reference::moe::capacity(ids, choices, experts, wanted, limit);
    let ids = Tensor::from_slice(d, ids, &[tokens, choices]).unwrap();
    let mut kept = Tensor::<i32>::uninit(d, &[tokens, choices]).unwrap();
    s.fill_bytes(&mut kept, 0x7f).unwrap();
    let mut loads = Tensor::<i32>::uninit(d, &[experts]).unwrap();
    capacity(s, &mut kept, Some(&mut loads), &ids, experts, wanted, limit).unwrap();
    assert_eq!(kept.to_vec().unwrap(), want);
    let counts: Vec<_> = (0..experts as i32).map(|e| want.iter().filter(|&&k| k == e).count() as i32).collect();
    assert_eq!(loads.to_vec().unwrap(), counts);
}

fn ids(n: usize, experts: usize, seed: u64) -> Vec<i32> {
    // Some of them -1, and some too large.
    noise(n, seed).iter().map(|x| ((x + 1.0) / 2.0 * (experts + 2) as f32) as i32 - 1).collect()
}

#[test]
fn matches_the_reference() {
    let shape = (0usize..90, 1usize..6, 1usize..40, 1usize..5, 0usize..9, 1u64..99);
    property(10, shape, |d, s, (tokens, choices, experts, wanted, limit, seed)| {
        check(d, s, &ids(tokens * choices, experts, seed), choices, experts, wanted, limit);
        Ok(())
    });
}

#[test]
fn more_tokens_than_threads() {
    on_every_device(|d, s| {
        check(d, s, &ids(1100 * 3, 7, 1), 3, 7, 2, 200);
        check(d, s, &ids(20, 2048, 1), 2, 2048, 1, 1);
    });
}

#[test]
fn captured_and_replayed() {
    on_every_device(|d, s| {
        let (tokens, choices, experts, wanted, limit) = (50, 4, 7, 2, 9);
        let mut input = Tensor::from_slice(d, &ids(tokens * choices, experts, 1), &[tokens, choices]).unwrap();
        let mut kept = Tensor::<i32>::uninit(d, &[tokens, choices]).unwrap();
        let mut loads = Tensor::<i32>::uninit(d, &[experts]).unwrap();
        d.preload(&["moe"]).unwrap();
        let graph =
            Graph::capture(s, |s| capacity(s, &mut kept, Some(&mut loads), &input, experts, wanted, limit)).unwrap();
        for seed in 5..7 {
            let ids = ids(tokens * choices, experts, seed);
            input.copy_from_slice(&ids).unwrap();
            let want = reference::moe::capacity(&ids, choices, experts, wanted, limit);
            let count = |e: i32| want.iter().filter(|&&k| k == e).count() as i32;
            for _ in 0..2 {
                s.fill_bytes(&mut kept, 0x7f).unwrap();
                s.fill_bytes(&mut loads, 0x7f).unwrap();
                graph.launch(s).unwrap();
                assert_eq!(kept.to_vec().unwrap(), want);
                assert_eq!(loads.to_vec().unwrap(), (0..experts as i32).map(count).collect::<Vec<_>>());
            }
        }
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let t = |shape: &[usize]| Tensor::<i32>::zeros(d, shape).unwrap();
        let ids = t(&[3, 2]);
        assert!(capacity(s, &mut t(&[3, 2]), None, &ids, 4, 1, 1).is_ok());
        let e = capacity(s, &mut t(&[2, 3]), None, &ids, 4, 1, 1);
        assert!(matches!(e, Err(Error::Shape { arg: "kept", .. })), "{e:?}");
        let e = capacity(s, &mut t(&[3, 2]), Some(&mut t(&[5])), &ids, 4, 1, 1);
        assert!(matches!(e, Err(Error::Shape { arg: "loads", .. })), "{e:?}");
        let e = capacity(s, &mut t(&[3, 2]), None, &ids, 2049, 1, 1);
        assert!(matches!(e, Err(Error::Value { arg: "experts", .. })), "{e:?}");
        let e = capacity(s, &mut ids.clone(), None, &ids, 4, 1, 1);
        assert!(matches!(e, Err(Error::Overlap { .. })), "{e:?}");
    });
}

#[test]
fn no_tokens_with_many_choices() {
    on_every_device(|d, s| {
        let none = || Tensor::<i32>::zeros(d, &[0, i32::MAX as usize]).unwrap();
        let mut loads = Tensor::from_slice(d, &[7; 4], &[4]).unwrap();
        capacity(s, &mut none(), Some(&mut loads), &none(), 4, usize::MAX >> 33, 1).unwrap();
        assert_eq!(loads.to_vec().unwrap(), [0; 4]);
    });
}
