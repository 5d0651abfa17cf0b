package main

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/garboard-os/garboard/api/attest"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config/pki"
)

func (a *app) attestCommand() *cobra.Command {
	var (
		want        attest.Proven
		owned, once string
	)
	cmd := command("attest", func(cmd *cobra.Command, _ []string) error {
		owner, err := policyKey(owned)
		if err != nil {
			return err
		}
		nonce, err := hex.DecodeString(once)
		if err != nil {
			return usagef("--nonce: %w", err)
		}
		if once == "" {
			nonce = make([]byte, sha256.Size)
			rand.Read(nonce) // never fails
		}
		return a.one(cmd.Context(), "attest", func(ctx context.Context, n *client.Client) error {
			answer, err := client.Unary(ctx, n.Node.Attest, &apiv1.AttestRequest{Nonce: nonce})
			if err != nil {
				return err
			}
			proven, err := attest.Verify(answer, nonce, owner, want)
			if err != nil {
				return fmt.Errorf("nothing is proven: %w", err)
			}
			fmt.Fprintf(a.out, "%s: a TPM says that it runs a system that the owner of %s has signed\ntpm   %s\npcr7  %s\npcr11 %s\n",
				n.Name, owned, proven.TPM, proven.PCR7, hex.EncodeToString(answer.System))
			if want.TPM == "" || want.PCR7 == "" {
				fmt.Fprintln(a.notes(), "without --tpm and --pcr7, other systems can say this, too: keep both of the day of the installation, and give them")
			}
			return nil
		})
	})
	f := cmd.Flags()
	f.StringVar(&owned, "owner", "secureboot", "directory of 'gbctl gen secureboot', or its file pcr.pub: who has to have signed the system")
	f.StringVar(&want.TPM, "tpm", "", "fingerprint that the TPM has to have; without it, it is shown")
	f.StringVar(&want.PCR7, "pcr7", "", "value that PCR 7 has to have, the firmware's keys and Secure Boot; without it, it is shown")
	f.StringVar(&once, "nonce", "", "16 to 64 bytes, hexadecimal, that were never used before (default random ones)")
	return cmd
}

// policyKey reads the public half of a PCR key.
func policyKey(path string) (*rsa.PublicKey, error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		path = filepath.Join(path, "pcr.pub")
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	key, err := pki.ParsePublicKey(text)
	public, ok := key.(*rsa.PublicKey)
	if err == nil && !ok {
		err = errors.New("the key isn't one of RSA")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return public, nil
}
