package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/garboard-os/garboard/qemu"
	"github.com/spf13/cobra"
)

// benchmarks are those of qemu/e2e/bench, without spaces, and what they boot.
var benchmarks = []struct{ name, boots string }{
	{"sizes", ""}, {"media", ""}, {"container", qemu.Container}, {"several containers", qemu.Container},
	{"shared address", qemu.Container}, {"operations", qemu.Container}, {"qemu", qemu.QEMU}, {"install", qemu.QEMU},
}

func benchCommand() *cobra.Command {
	var provisioner, only string
	var clusters int
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure, and print each figure beside its budget",
		Long: `Measure, and print each figure beside its budget. It fails if one is over.

Boots a fresh one-node cluster as a container and one in QEMU, one after the
other, then one of several containers, and one whose control planes share an address,
and removes them again. Times on a machine that does other things wobble:
compare figures of one run.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bench(cmd.Context(), cmd.OutOrStdout(), provisioner, only, clusters)
		},
	}
	cmd.Flags().StringVar(&only, "only", "", "make only these figures, such as install or operations (default all)")
	cmd.Flags().StringVar(&provisioner, "provisioner", qemu.Auto, "what to boot: qemu, container, or auto for both")
	cmd.Flags().IntVar(&clusters, "clusters", 1, "how many clusters of several containers are made, one after the other; 1 or more")
	return cmd
}

func bench(ctx context.Context, out io.Writer, provisioner, only string, clusters int) error {
	switch {
	case provisioner != qemu.Auto && provisioner != qemu.Container && provisioner != qemu.QEMU:
		return fmt.Errorf("--provisioner %q: must be %s, %s or %s", provisioner, qemu.QEMU, qemu.Container, qemu.Auto)
	case clusters < 1:
		return fmt.Errorf("--clusters %d: must be 1 or more", clusters)
	}
	if provisioner != qemu.QEMU && os.Geteuid() != 0 {
		fmt.Fprintln(out, "container nodes need root: left out")
		provisioner = qemu.QEMU
	}
	var possible, chosen []string
	for _, b := range benchmarks {
		if b.boots == "" || provisioner == qemu.Auto || b.boots == provisioner {
			possible = append(possible, b.name)
			if only == "" || b.name == only {
				chosen = append(chosen, strings.ReplaceAll(b.name, " ", ""))
			}
		}
	}
	if len(chosen) == 0 {
		return fmt.Errorf("--only %q: must be one of %s", only, strings.Join(possible, ", "))
	}
	root, err := prepared(ctx, out, false)
	if err != nil {
		return err
	}
	return goRun(ctx, root, out, "test", "-trimpath", "-tags=e2e", "-count=1", "-run=^$", "-bench=(?i)^Benchmark("+strings.Join(chosen, "|")+")$",
		"-benchtime=1x", "-timeout=0", "-v", "./qemu/e2e/bench", fmt.Sprintf("-clusters=%d", clusters))
}
