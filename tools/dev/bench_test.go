package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/qemu"
)

func TestBenchIsToldNonsense(t *testing.T) {
	for want, args := range map[string]struct {
		provisioner, only string
		clusters          int
	}{
		"--clusters 0: must be 1 or more": {qemu.Auto, "", 0},
		`--provisioner "docker": must be`: {"docker", "", 1},
		`--only "install": must be one of sizes, media, container, several containers, shared address, operations`: {qemu.Container, "install", 1},
		`--only "box": must be one of sizes, media, qemu, install`:                                                 {qemu.QEMU, "box", 1},
	} {
		if err := bench(t.Context(), io.Discard, args.provisioner, args.only, args.clusters); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", args, err, want)
		}
	}
}

// The command knows the benchmarks, in the order in which go test runs them.
func TestBenchKnowsTheBenchmarks(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../qemu/e2e/bench/*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	var got, want []string
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^func Benchmark(\w+)\(`).FindAllStringSubmatch(string(source), -1) {
			got = append(got, strings.ToLower(m[1]))
		}
	}
	for _, b := range benchmarks {
		want = append(want, strings.ReplaceAll(b.name, " ", ""))
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("the benchmarks are %q, and the command knows %q", got, want)
	}
}
