package main

import (
	"context"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config/patch"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
)

// tokenTTL is the default of token create: a day to set machines up.
const tokenTTL = 24 * time.Hour

func (a *app) tokenCommand() *cobra.Command {
	list := listCommand(a, "list", []string{"ID", "ENDS", "DESCRIPTION"}, asking(ofAccess, accessAPI.ListTokens, &apiv1.ListTokensRequest{}), rowsOf((*apiv1.ListTokensResponse).GetTokens, tokenRow))
	r := &apiv1.RevokeTokenRequest{}
	var after time.Duration
	revoke := messageCommand(a, "revoke ID", &r.Id, asking(ofAccess, accessAPI.RevokeToken, r))
	revoke.PreRun = func(*cobra.Command, []string) { r.After = durationpb.New(after) }
	revoke.Flags().DurationVar(&after, "after", 0, "how long the token may still be used")
	return group("token", a.tokenCreateCommand(), list, revoke)
}

func tokenRow(t *apiv1.JoinToken) []string {
	switch {
	case t.Ends == nil:
		return []string{t.Id, "never", t.Description}
	case t.Ends.AsTime().Before(time.Now()):
		return []string{t.Id, "has ended", t.Description}
	}
	return []string{t.Id, stamp(t.Ends.AsTime()), t.Description}
}

func (a *app) tokenCreateCommand() *cobra.Command {
	r := &apiv1.CreateTokenRequest{}
	var ttl time.Duration
	var file string
	cmd := command("create", func(cmd *cobra.Command, _ []string) (err error) {
		var worker []byte
		if file != "" {
			if worker, err = a.readInput(file); err != nil {
				return err
			}
		}
		r.Ttl = durationpb.New(ttl)
		return a.one(cmd.Context(), "token create", func(ctx context.Context, c *client.Client) error {
			m, err := client.Unary(ctx, c.Access.CreateToken, r)
			if err != nil {
				return err
			}
			text := fmt.Appendf(nil, "machine:\n  token: %s\ncluster:\n  token: %[1]s\n", m.Token)
			fmt.Fprintf(a.notes(), "machines join with it until %s; it belongs into the configuration of workers:\n", stamp(m.Ends.AsTime()))
			if file != "" {
				if text, err = patch.Apply(worker, text); err != nil {
					return fmt.Errorf("%s: %w; the token is %s", file, err, m.Token)
				}
			}
			_, err = a.out.Write(text)
			return err
		})
	})
	f := cmd.Flags()
	f.DurationVar(&ttl, "ttl", tokenTTL, "how long the token lasts, a minute to a year")
	f.StringVar(&r.Description, "description", "", "what it is for")
	f.StringVarP(&file, "file", "f", "", "configuration of a worker, or - for standard input: print it with the token")
	return cmd
}
