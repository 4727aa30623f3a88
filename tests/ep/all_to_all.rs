use super::ranks::{on_every_setup, run};
use warploom::ep::{Blocks, Config};
use warploom::{Error, Tensor};

#[test]
fn pieces_change_places() {
    on_every_setup(&[1, 2, 3, 8], |devices| {
        let ranks = devices.len();
        run(devices, &Config::new(1024, 1, ranks, 8), |rank, stream, meeting| {
            for n in [0, 4, 1000, 2048] {
                let value = |from: usize, to: usize, i: usize| (from * 1000 + to * 100_000 + i) as i32;
                let piece = |from: usize, to: usize| (0..n).map(move |i| value(from, to, i));
                let x: Vec<i32> = (0..ranks).flat_map(|to| piece(rank.rank(), to)).collect();
                let x = Tensor::from_slice(rank.device(), &x, &[ranks, n]).unwrap();
                meeting.wait();
                let got = rank.all_to_all(stream, &x, Blocks::count(2).threads(64)).unwrap();
                rank.check(stream).unwrap();
                meeting.wait();
                let want: Vec<i32> = (0..ranks).flat_map(|from| piece(from, rank.rank())).collect();
                assert_eq!(got.to_vec().unwrap(), want);
                meeting.wait();
            }
            // Freeing waits for the GPU, which others may share.
            meeting.wait();
            rank.barrier(stream).unwrap();
            rank.check(stream).unwrap();
        });
    });
}

#[test]
fn bad_input() {
    on_every_setup(&[2], |devices| {
        run(devices, &Config::new(64, 1, 2, 4), |rank, stream, _| {
            let x = |shape: &[usize]| Tensor::<f32>::zeros(rank.device(), shape).unwrap();
            let (three, odd, large) = (x(&[3, 4]), x(&[2, 3]), x(&[2, 1000]));
            let e = rank.all_to_all(stream, &three, Blocks::default());
            assert!(matches!(e, Err(Error::Shape { arg: "x", .. })), "{e:?}");
            let e = rank.all_to_all(stream, &odd, Blocks::default());
            assert!(matches!(e, Err(Error::Value { arg: "x", .. })), "{e:?}");
            let e = rank.all_to_all(stream, &large, Blocks::default());
            assert!(matches!(e, Err(Error::Value { arg: "x", .. })), "{e:?}");
        });
    });
}
