package main

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

// absolute checks a path on a node. Nodes have no working directory.
func (a *app) absolute(name string) (string, error) {
	if node, path, remote := strings.Cut(name, ":/"); remote {
		return "", didYouMean("a node is named with -n", slices.Concat([]string{"-n", node}, a.instead(name, "/"+path)))
	} else if !strings.HasPrefix(name, "/") {
		return "", usagef("%q must be an absolute path: type '%s'", name, commandLine(a.instead(name, "/"+name)...))
	}
	return path.Clean(name), nil
}

func (a *app) lsCommand() *cobra.Command {
	r := &apiv1.ListFilesRequest{}
	var long bool
	cmd := command("ls [PATH]", func(cmd *cobra.Command, args []string) (err error) {
		if r.Path = "/"; len(args) > 0 {
			if r.Path, err = a.absolute(args[0]); err != nil {
				return err
			}
		}
		return a.ls(cmd.Context(), r, long)
	})
	cmd.Flags().BoolVarP(&long, "long", "l", false, "show modes, owners, sizes and times")
	cmd.Flags().Uint32Var(&r.Depth, "depth", 1, "how many levels of directories to list")
	return a.outputFlag(cmd)
}

func (a *app) ls(ctx context.Context, r *apiv1.ListFilesRequest, long bool) error {
	answers, failed := gather(ctx, a, func(ctx context.Context, c *client.Client) ([]*apiv1.FileInfo, error) {
		return receiveAll(ctx, c.File.List, r)
	})
	head := []string{"NODE", "NAME"}
	if long {
		head = []string{"NODE", "MODE", "UID", "GID", "SIZE", "MODIFIED", "NAME"}
	}
	return errors.Join(showItems(a, answers, head, func(node string, f *apiv1.FileInfo) []string {
		if f.Error != "" && a.output == "table" {
			fmt.Fprintf(a.err, "%s: %s: %s\n", node, f.Name, f.Error)
		}
		return fileRow(node, f, long)
	}), failed)
}

func fileRow(node string, f *apiv1.FileInfo, long bool) []string {
	if !long {
		return []string{node, f.Name}
	}
	name := f.Name
	if f.Link != "" {
		name += " -> " + f.Link
	}
	modified := ""
	if f.Modified != nil {
		modified = f.Modified.AsTime().UTC().Format("2006-01-02 15:04:05")
	}
	return []string{node, f.Mode, strconv.Itoa(int(f.Uid)), strconv.Itoa(int(f.Gid)), strconv.FormatUint(f.Size, 10), modified, name}
}

func (a *app) readCommand() *cobra.Command {
	return command("read PATH", func(cmd *cobra.Command, args []string) error {
		name, err := a.absolute(args[0])
		if err != nil {
			return err
		}
		return a.untimed(cmd.Context(), "read", func(ctx context.Context, c *client.Client) error {
			return client.Receive(ctx, c.File.Read, &apiv1.ReadFileRequest{Path: name}, func(m *apiv1.FileChunk) error {
				_, err := a.out.Write(m.Data)
				return err
			})
		})
	})
}
