package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
)

// explain makes of what went wrong between us and a node an error that says what
// to do next, with the exit code for it.
func (a *app) explain(node string, err error) error {
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	var exit *exitError
	if errors.As(err, &exit) {
		return err
	}
	for _, explain := range []func(string, error) error{a.explainTrust, a.explainAlert, a.explainNetwork, a.explainAnswer} {
		if explained := explain(node, err); explained != nil {
			return explained
		}
	}
	return err
}

// explainTrust is for nodes that we don't believe.
func (a *app) explainTrust(node string, err error) error {
	denied := func(format string, args ...any) error {
		return &exitError{codeDenied, fmt.Errorf(format, args...)}
	}
	var authority x509.UnknownAuthorityError
	var name x509.HostnameError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.Is(err, client.ErrFingerprint):
		return denied("%w: this isn't the node that you mean, or it has been started anew since: look at its console", cause(err, client.ErrFingerprint))
	case errors.As(err, &authority) && selfSigned(authority.Cert), errors.As(err, &name) && selfSigned(name.Certificate):
		return denied("shows a certificate that it signed itself: it is in maintenance mode, and has no configuration yet. Give it one with 'gbctl -n %s apply-config --insecure -f FILE'", node)
	case errors.As(err, &authority):
		return denied("its certificate isn't signed by the authority of %s: it belongs to another cluster, or the cluster's authority was changed. 'gbctl config contexts' lists the contexts, --context chooses one", a.contextLabel())
	case errors.As(err, &name):
		return denied("its certificate is for %s, not for %s: name the node so, or add this name to machine.certSANs", names(name.Certificate), name.Host)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return denied("its certificate is valid from %s to %s, and here it is %s: one of the two clocks is wrong, or the node couldn't renew it",
			stamp(invalid.Cert.NotBefore), stamp(invalid.Cert.NotAfter), stamp(time.Now()))
	}
	return nil
}

func selfSigned(cert *x509.Certificate) bool {
	return cert != nil && cert.CheckSignature(cert.SignatureAlgorithm, cert.RawTBSCertificate, cert.Signature) == nil
}

// cause is the error in the chain that wraps target directly, with its own words
// only.
func cause(err, target error) error {
	for next := err; next != nil; next = errors.Unwrap(next) {
		if errors.Is(next, target) && !isCarrier(next) {
			return next
		}
	}
	return err
}

// isCarrier is for the layers that only say which request it was.
func isCarrier(err error) bool {
	switch err.(type) {
	case *connect.Error, *tls.CertificateVerificationError, interface{ Timeout() bool }:
		return true
	}
	return false
}

func names(cert *x509.Certificate) string {
	all := slices.Clone(cert.DNSNames)
	for _, ip := range cert.IPAddresses {
		all = append(all, ip.String())
	}
	if len(all) == 0 {
		return "no name"
	}
	return strings.Join(all, ", ")
}

// contextLabel names the context in use, and where it is.
func (a *app) contextLabel() string {
	path, _ := a.path()
	name := a.contextName
	if config, err := client.Load(path); err == nil && name == "" {
		name = config.Context
	}
	return fmt.Sprintf("context %q in %s", name, path)
}

// renewal is how an administrator's certificate is made anew (S-153).
const renewal = `'gbctl gen csr --key admin.key', then 'gbctl gen crt --ca ca --csr admin.csr --name admin', and put the result into the client configuration as crt`

// alerts are what a node says about our certificate, in the words of crypto/tls.
var alerts = []struct{ words, meaning string }{
	{"tls: certificate required", "it wants a certificate, and there is none in %s"},
	{"tls: expired certificate", "the certificate in %s has expired; renew it: " + renewal},
	{"tls: unknown certificate authority", "it doesn't know the authority that signed the certificate in %s: the context is for another cluster, or the cluster's authority was changed"},
	{"tls: bad certificate", "it doesn't accept the certificate in %s: another cluster's, or an expired one"},
	{"tls: unknown certificate", "it doesn't accept the certificate in %s"},
	{"tls: access denied", "it doesn't let the certificate in %s in"},
}

// explainAlert is for nodes that don't believe us.
func (a *app) explainAlert(_ string, err error) error {
	text := err.Error()
	for _, alert := range alerts {
		if !strings.Contains(text, alert.words) {
			continue
		}
		meaning := fmt.Sprintf(alert.meaning, a.contextLabel())
		if expired := a.expired(); expired != "" {
			meaning = expired
		}
		return &exitError{codeDenied, errors.New(meaning)}
	}
	return nil
}

// expired says so where our own certificate is.
func (a *app) expired() string {
	c, err := a.access()
	if err != nil || c == nil {
		return ""
	}
	_, pair, err := c.Credentials()
	if err != nil {
		return ""
	}
	if end := pair.Leaf.NotAfter; time.Now().After(end) {
		return fmt.Sprintf("the certificate of %s expired on %s; renew it: %s", a.contextLabel(), stamp(end), renewal)
	}
	return ""
}

// explainNetwork is for nodes that aren't there.
func (a *app) explainNetwork(node string, err error) error {
	unreachable := func(format string, args ...any) error {
		return &exitError{codeUnreachable, fmt.Errorf(format, args...)}
	}
	var dns *net.DNSError
	var op *net.OpError
	errors.As(err, &op)
	_, address, _ := client.Address(node)
	if op != nil && op.Addr != nil {
		address = op.Addr.String()
	}
	switch {
	case errors.As(err, &dns):
		return unreachable("the name %s isn't known here (%s): give its address, or put it into DNS", dns.Name, dns.Err)
	case errors.Is(err, syscall.ECONNREFUSED):
		return unreachable("refuses connections at %s: nothing listens there yet. Is it a Garboard node, and has it come up? Its console says what it waits for", address)
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return unreachable("no way leads to %s (%s): is the machine on, and in a network that can be reached from here?", address, op.Err)
	case op != nil && op.Op == "dial" && op.Timeout():
		return unreachable("no answer from %s: is the machine on, and is its port let through?", address)
	case strings.Contains(err.Error(), "does not look like a TLS handshake"):
		return unreachable("what listens at %s doesn't speak TLS: it isn't the machine API", address)
	case (broken(err) || op != nil && op.Op == "dial") && client.Closed(err): // in other words each time, depending on the moment
		return unreachable("closes the connection: it goes down, or restarts its API; try again")
	case op != nil && op.Op == "dial":
		return unreachable("connect to %s: %w", address, op.Err)
	case broken(err):
		return unreachable("the connection to %s broke (%w): the node goes down or restarts its API; try again", address, innermost(err))
	}
	return nil
}

// innermost is the error at the bottom: what happened, without the layers it came through.
func innermost(err error) error {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err
		}
		err = inner
	}
}

// explainAnswer is for nodes that have said no.
func (a *app) explainAnswer(_ string, err error) error {
	var answer *connect.Error
	if !errors.As(err, &answer) {
		return nil
	}
	code, known := byConnectCode[answer.Code()]
	if !known {
		code = codeFailed
	}
	message := answer.Message()
	switch answer.Code() {
	case connect.CodeDeadlineExceeded:
		message = fmt.Sprintf("no answer within %s; --timeout gives it longer", a.timeout)
	case connect.CodePermissionDenied, connect.CodeUnauthenticated:
		message += a.roles()
	case connect.CodeUnimplemented:
		message = "doesn't know this request: it runs another release ('gbctl version' shows which)"
	}
	return &exitError{code, &answerError{message, err}}
}

// answerError says what a node said, in its words alone.
type answerError struct {
	message string
	err     error
}

func (e *answerError) Error() string { return e.message }
func (e *answerError) Unwrap() error { return e.err }

// roles says what our certificate is good for.
func (a *app) roles() string {
	c, err := a.access()
	if err != nil || c == nil {
		return ""
	}
	_, pair, err := c.Credentials()
	if err != nil {
		return ""
	}
	have := "no role"
	if orgs := pair.Leaf.Subject.Organization; len(orgs) > 0 {
		have = strings.Join(orgs, ", ")
	}
	return fmt.Sprintf(" (the certificate of %s is %q and has %s)", a.contextLabel(), pair.Leaf.Subject.CommonName, have)
}

// stamp is a time as people compare it with their clock.
func stamp(t time.Time) string { return t.Local().Format("2006-01-02 15:04:05 MST") }
