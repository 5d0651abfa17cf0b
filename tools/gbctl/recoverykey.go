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
	var file string
	cmd := command("add", func(cmd *cobra.Command, _ []string) (err error) {
		a.raiseTimeout(cmd, unlockTimeout)
		if file == "" && !a.yes && !interactive(a.in) {
			return usagef("nothing was done: recovery-key add asks for the key that it has shown, and standard input isn't a terminal; use --yes, and keep standard output")
		}
		if _, err := a.single(cmd.Context(), "recovery-key add"); err != nil {
			return err
		}
		var key string
		if file != "" {
			key, err = a.givenRecoveryKey(file)
		} else {
			key, err = a.newRecoveryKey(cmd.Context())
		}
		if err != nil {
			return err
		}
		return a.one(cmd.Context(), "recovery-key add", func(ctx context.Context, c *client.Client) error {
			_, err := client.Unary(ctx, c.Node.AddRecoveryKey, &apiv1.RecoveryKeyRequest{Key: []byte(key)})
			if err == nil {
				fmt.Fprintf(a.notes(), "%s: the recovery key opens its encrypted volumes\n", c.Name)
			}
			return err
		})
	})
	keyFileFlag(cmd, &file, "a key that you have already, instead of a new one")
	cmd.Flags().BoolVarP(&a.yes, "yes", "y", false, "don't ask; required without a terminal")
	return cmd
}

func keyFileFlag(cmd *cobra.Command, to *string, what string) {
	cmd.Flags().StringVar(to, "key-file", "", "file with "+what+"; - is standard input")
}

// newRecoveryKey makes a key and shows it. Who can't type its last group doesn't have it.
func (a *app) newRecoveryKey(ctx context.Context) (string, error) {
	key := client.NewRecoveryKey()
	if _, err := fmt.Fprintln(a.out, key); err != nil || a.yes {
		return key, err
	}
	fmt.Fprint(a.err, "This key opens the disk of the machine in any other one, and isn't shown again: keep it outside of the machine.\nIts last group: ")
	_, lines := a.userInput()
	select {
	case <-ctx.Done():
		return "", ctx.Err()
	case line := <-lines:
		if typed := strings.ToLower(strings.TrimSpace(line)); typed == "" || !strings.HasSuffix(key, "-"+typed) {
			return "", errors.New("nothing was done: that isn't the last group of the key")
		}
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
func (a *app) typedRecoveryKey() (string, error) {
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
	var file string
	cmd := command("unlock", func(cmd *cobra.Command, _ []string) (err error) {
		a.raiseTimeout(cmd, unlockTimeout)
		if _, err := a.single(cmd.Context(), "unlock"); err != nil {
			return err
		}
		var key string
		if file != "" {
			key, err = a.givenRecoveryKey(file)
		} else {
			key, err = a.typedRecoveryKey()
		}
		if err != nil {
			return err
		}
		return a.one(cmd.Context(), "unlock", func(ctx context.Context, c *client.Client) error {
			n, err := a.trusted(ctx, c, "the recovery key")
			if err != nil {
				return err
			}
			defer n.Close()
			if _, err := client.Unary(ctx, n.Node.Unlock, &apiv1.RecoveryKeyRequest{Key: []byte(key)}); err != nil {
				return err
			}
			fmt.Fprintf(a.out, "%s: is unlocked, and its boot goes on: gbctl -n %[1]s health --wait 10m\n", c.Name)
			return nil
		})
	})
	keyFileFlag(cmd, &file, "the recovery key, instead of a question")
	return a.insecureFlags(cmd)
}
