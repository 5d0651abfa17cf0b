package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// unlockTimeout is for machines that take seconds for each key of a disk.
const unlockTimeout = 3 * time.Minute

func (a *app) recoveryKeyCommand() *cobra.Command {
	list := listCommand(a, "list", []string{"VOLUME", "RECOVERY KEY", "ADDED"}, asking(ofNode, nodeAPI.ListRecoveryKeys, &apiv1.RecoveryKeyRequest{}), rowsOf((*apiv1.RecoveryKeyResponse).GetVolumes, recoveryRow))
	remove := command("remove", func(cmd *cobra.Command, _ []string) error {
		a.raiseTimeout(cmd, unlockTimeout)
		return a.one(cmd.Context(), "recovery-key remove", func(ctx context.Context, c *client.Client) error {
			_, err := client.Unary(ctx, c.Node.RemoveRecoveryKey, &apiv1.RecoveryKeyRequest{})
			if err == nil {
				fmt.Fprintf(a.out, "%s: no recovery key opens its disk any more\n", c.Name)
			}
			return err
		})
	})
	return group("recovery-key", a.recoveryKeyAddCommand(), list, remove)
}

func recoveryRow(v *apiv1.VolumeRecoveryKey) []string {
	row := []string{v.Volume, "none", ""}
	if len(v.Slots) > 0 {
		row[1] = "slot " + strings.Trim(fmt.Sprint(v.Slots), "[]")
	}
	if v.Added != nil {
		row[2] = stamp(v.Added.AsTime())
	}
	return row
}

func (a *app) recoveryKeyAddCommand() *cobra.Command {
	fresh := func(ctx context.Context) (string, error) {
		if !a.yes && !interactive(a.in) {
			return "", usagef("nothing was done: recovery-key add asks for the key that it has shown, and standard input isn't a terminal; use --yes, and keep standard output")
		}
		return a.newRecoveryKey(ctx)
	}
	cmd := a.keyCommand("add", "a key that you have already, instead of a new one", fresh, func(ctx context.Context, c *client.Client, r *apiv1.RecoveryKeyRequest) error {
		_, err := client.Unary(ctx, c.Node.AddRecoveryKey, r)
		if err == nil {
			fmt.Fprintf(a.notes(), "%s: the recovery key opens its encrypted volumes\n", c.Name)
		}
		return err
	})
	cmd.Flags().BoolVarP(&a.yes, "yes", "y", false, "don't ask; required without a terminal")
	return cmd
}

// keyCommand makes a command that does something with a recovery key on one node. The key is in a file, what, or comes
// from elsewhere.
func (a *app) keyCommand(use, what string, elsewhere func(context.Context) (string, error), do func(context.Context, *client.Client, *apiv1.RecoveryKeyRequest) error) *cobra.Command {
	var file string
	cmd := command(use, func(cmd *cobra.Command, _ []string) (err error) {
		a.raiseTimeout(cmd, unlockTimeout)
		if _, err := a.single(cmd.Context(), pathOf(cmd)); err != nil {
			return err
		}
		var key string
		if file != "" {
			key, err = a.givenRecoveryKey(file)
		} else {
			key, err = elsewhere(cmd.Context())
		}
		if err != nil {
			return err
		}
		return a.one(cmd.Context(), pathOf(cmd), func(ctx context.Context, c *client.Client) error {
			return do(ctx, c, &apiv1.RecoveryKeyRequest{Key: []byte(key)})
		})
	})
	cmd.Flags().StringVar(&file, "key-file", "", "file with "+what+"; - is standard input")
	return cmd
}

// newRecoveryKey makes a key and shows it. Who can't type its last group doesn't have it.
func (a *app) newRecoveryKey(ctx context.Context) (string, error) {
	key := client.NewRecoveryKey()
	if _, err := fmt.Fprintln(a.out, key); err != nil || a.yes {
		return key, err
	}
	typed, err := a.typed(ctx, "This key opens the disk of the machine in any other one, and isn't shown again: keep it outside of the machine.\nIts last group: ")
	if typed = strings.ToLower(typed); err == nil && (typed == "" || !strings.HasSuffix(key, "-"+typed)) {
		err = errors.New("nothing was done: that isn't the last group of the key")
	}
	if err != nil {
		return "", err
	}
	return key, nil
}

func (a *app) givenRecoveryKey(file string) (string, error) {
	text, err := a.readInput(file)
	if err != nil {
		return "", err
	}
	key, err := api.ParseRecoveryKey(string(text))
	if err != nil {
		return "", fmt.Errorf("%s: %w", file, err)
	}
	return key, nil
}

// typedRecoveryKey asks for a key, which the terminal doesn't show.
func (a *app) typedRecoveryKey(context.Context) (string, error) {
	in, ok := a.in.(*os.File)
	if !ok || !interactive(a.in) {
		return "", usagef("nothing was done: unlock asks for the recovery key, and standard input isn't a terminal; use --key-file")
	}
	fmt.Fprint(a.err, "recovery key (it isn't shown): ")
	text, err := term.ReadPassword(int(in.Fd()))
	fmt.Fprintln(a.err)
	if err != nil {
		return "", err
	}
	return api.ParseRecoveryKey(string(text))
}

func (a *app) unlockCommand() *cobra.Command {
	return a.insecureFlags(a.keyCommand("unlock", "the recovery key, instead of a question", a.typedRecoveryKey, func(ctx context.Context, c *client.Client, r *apiv1.RecoveryKeyRequest) error {
		n, err := a.trusted(ctx, c, "the recovery key")
		if err != nil {
			return err
		}
		defer n.Close()
		if _, err := client.Unary(ctx, n.Node.Unlock, r); err != nil {
			return err
		}
		fmt.Fprintf(a.out, "%s: is unlocked, and its boot goes on: gbctl -n %[1]s health --wait 10m\n", c.Name)
		return nil
	}))
}
