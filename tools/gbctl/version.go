package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"runtime"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
)

func (a *app) versionCommand() *cobra.Command {
	var own bool
	cmd := command("version", func(cmd *cobra.Command, _ []string) error {
		return a.version(cmd.Context(), own)
	})
	cmd.Flags().BoolVar(&own, "client", false, "show only the release of gbctl")
	return a.insecureFlags(a.outputFlag(cmd))
}

func (a *app) version(ctx context.Context, own bool) error {
	head := []string{"NODE", "VERSION", "PLATFORM", "KERNEL", "MODE", "HOSTNAME"}
	platform := runtime.GOOS + "/" + runtime.GOARCH
	rows := [][]string{{"gbctl", boot.Version, platform, "", "", ""}}
	documents := []*yaml.Node{mapping("client", mapping("version", boot.Version, "platform", platform, "goVersion", runtime.Version()))}
	var failed error
	if !own {
		answers, err := gather(ctx, a, asking(ofNode, nodeAPI.Version, &apiv1.VersionRequest{}))
		if errors.Is(err, fs.ErrNotExist) && len(a.nodes) == 0 {
			// After the installation of gbctl there is no client configuration yet.
			fmt.Fprintln(a.notes(), "no node was asked:", err)
		} else {
			failed = err
		}
		for _, n := range answers {
			v := n.value
			rows = append(rows, []string{n.node, v.Version, v.Platform, v.Kernel, v.Mode, v.Hostname})
			documents = append(documents, document(n.node, v))
		}
	}
	return errors.Join(a.show(documents, own, func() error { return table(a.out, head, rows) }), failed)
}
