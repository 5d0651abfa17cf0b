package main

import (
	"cmp"
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

// explain adds the next step and the exit code to an error of the connection to a node or
// of its answer.
func (a *app) explain(node string, err error) error {
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	if _, ok := errors.AsType[*exitError](err); ok {
		return err
	}
	for _, explain := range []func(string, error) error{a.explainTrust, a.explainAlert, a.explainNetwork, a.explainAnswer} {
		if explained := explain(node, err); explained != nil {
			return explained
		}
	}
	return err
}

// explainTrust explains why the certificate of a node isn't trusted.
func (a *app) explainTrust(node string, err error) error {
	var authority x509.UnknownAuthorityError
	var name x509.HostnameError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.Is(err, errWorker):
		return &exitError{codeRefused, cause(err, errWorker)}
	case errors.Is(err, client.ErrFingerprint):
		return exitf(codeDenied, "%w: this is a different machine, or it has restarted since then: see the fingerprint on its console", cause(err, client.ErrFingerprint))
	case errors.As(err, &authority) && selfSigned(authority.Cert), errors.As(err, &name) && selfSigned(name.Certificate):
		return exitf(codeDenied, "presents a self-signed certificate: the node is in maintenance mode and has no configuration yet, or is a worker whose certificate no control plane has signed yet, or waits for its recovery key. Its console shows which, and the fingerprint. Apply a configuration with 'gbctl -n %s apply-config --insecure -f FILE', or unlock its disk with 'gbctl -n %[1]s unlock --insecure'", node)
	case errors.As(err, &authority):
		return exitf(codeDenied, "its certificate isn't signed by the authority of %s: it belongs to another cluster, or the cluster's authority was changed. 'gbctl config contexts' lists the contexts, --context selects one", a.contextLabel())
	case errors.As(err, &name):
		return exitf(codeDenied, "its certificate is for %s, not for %s: use one of these names, or add this name to machine.certSANs", names(name.Certificate), name.Host)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return exitf(codeDenied, "its certificate is valid from %s to %s, and the local time is %s: one of the clocks is wrong, or the node couldn't renew the certificate",
			stamp(invalid.Cert.NotBefore), stamp(invalid.Cert.NotAfter), stamp(time.Now()))
	}
	return nil
}

func selfSigned(cert *x509.Certificate) bool {
	return cert != nil && cert.CheckSignature(cert.SignatureAlgorithm, cert.RawTBSCertificate, cert.Signature) == nil
}

// cause returns the error in the chain that wraps target directly, without the outer
// layers.
func cause(err, target error) error {
	for next := err; next != nil; next = errors.Unwrap(next) {
		if errors.Is(next, target) && !isCarrier(next) {
			return next
		}
	}
	return err
}

// isCarrier reports whether an error is a layer that only describes the request.
func isCarrier(err error) bool {
	switch err.(type) {
	case *connect.Error, *tls.CertificateVerificationError, interface{ Timeout() bool }:
		return true
	}
	return false
}

func names(cert *x509.Certificate) string {
	all := slices.Concat(cert.DNSNames, ofEach(cert.IPAddresses, net.IP.String))
	return cmp.Or(strings.Join(all, ", "), "no name")
}

// contextLabel names the context in use and its file.
func (a *app) contextLabel() string {
	path, _ := a.path()
	name := a.contextName
	if config, err := loadClient(path); err == nil && name == "" {
		name = config.Context
	}
	return fmt.Sprintf("context %q in %s", name, path)
}

// renewal describes how to renew an administrator's certificate.
const renewal = `'gbctl gen key --name admin', 'gbctl gen csr --key admin.key', then 'gbctl gen crt --ca ca --csr admin.csr --name admin', and put the result into the client configuration as crt`

// alerts are the TLS alerts of a node about our certificate, in the words of crypto/tls.
var alerts = []struct{ words, meaning string }{
	{"tls: certificate required", "it requires a certificate, and there is none in %s"},
	{"tls: expired certificate", "the certificate in %s has expired; renew it: " + renewal},
	{"tls: unknown certificate authority", "the certificate in %s is signed by an unknown authority: the context is for another cluster, or the cluster's authority was changed"},
	{"tls: bad certificate", "it doesn't accept the certificate in %s: it is of another cluster, or expired"},
	{"tls: unknown certificate", "it doesn't accept the certificate in %s"},
	{"tls: access denied", "it refuses access with the certificate in %s"},
}

// explainAlert explains why a node refuses our certificate.
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

// certificate returns our own certificate, or nil if there is no usable one.
func (a *app) certificate() *x509.Certificate {
	c, err := a.access()
	if err != nil || c == nil {
		return nil
	}
	_, pair, err := c.Credentials()
	if err != nil {
		return nil
	}
	return pair.Leaf
}

// expired describes the expiry of our own certificate, or is empty.
func (a *app) expired() string {
	if own := a.certificate(); own != nil && time.Now().After(own.NotAfter) {
		return fmt.Sprintf("the certificate of %s expired on %s; renew it: %s", a.contextLabel(), stamp(own.NotAfter), renewal)
	}
	return ""
}

// explainNetwork explains why a node isn't reachable.
func (a *app) explainNetwork(node string, err error) error {
	var dns *net.DNSError
	var op *net.OpError
	errors.As(err, &op)
	_, address, _ := client.Address(node)
	if op != nil && op.Addr != nil {
		address = op.Addr.String()
	}
	switch {
	case errors.As(err, &dns):
		return exitf(codeUnreachable, "the name %s can't be resolved (%s): use the address, or add the name to DNS", dns.Name, dns.Err)
	case errors.Is(err, syscall.ECONNREFUSED):
		return exitf(codeUnreachable, "refuses connections at %s: is it a Garboard node, and is it up? Its console shows what it waits for", address)
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return exitf(codeUnreachable, "no route to %s (%s): is the machine on, and is its network reachable from here?", address, op.Err)
	case op != nil && op.Op == "dial" && op.Timeout():
		return exitf(codeUnreachable, "no answer from %s: is the machine on, and does a firewall block the port?", address)
	case strings.Contains(err.Error(), "does not look like a TLS handshake"):
		return exitf(codeUnreachable, "the server at %s doesn't use TLS: it isn't the machine API", address)
	case (broken(err) || op != nil && op.Op == "dial") && client.Closed(err): // the error depends on the moment
		return exitf(codeUnreachable, "closes the connection: the node shuts down or restarts its API; try again")
	case op != nil && op.Op == "dial":
		return exitf(codeUnreachable, "connect to %s: %w", address, op.Err)
	case broken(err):
		return exitf(codeUnreachable, "the connection to %s broke (%w): the node shuts down or restarts its API; try again", address, innermost(err))
	}
	return nil
}

// innermost returns the error at the end of the chain.
func innermost(err error) error {
	for inner := err; inner != nil; inner = errors.Unwrap(inner) {
		err = inner
	}
	return err
}

// explainAnswer explains an error in the answer of a node.
func (a *app) explainAnswer(node string, err error) error {
	answer, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return nil
	}
	message := here(node, answer.Message())
	switch answer.Code() {
	case connect.CodeNotFound:
		message = a.misspelt(message)
	case connect.CodeDeadlineExceeded:
		message = fmt.Sprintf("no answer within %s; use --timeout to wait longer", a.timeout)
	case connect.CodePermissionDenied, connect.CodeUnauthenticated:
		message += a.roles()
	case connect.CodeUnimplemented:
		message = "doesn't support this request: it runs another release ('gbctl version' shows it)"
	}
	return &exitError{exitCode(answer), &answerError{message, err}}
}

// answerError is the error in the answer of a node, without the text that connect adds.
type answerError struct {
	message string
	err     error
}

func (e *answerError) Error() string { return e.message }
func (e *answerError) Unwrap() error { return e.err }

// roles describes the roles in our certificate.
func (a *app) roles() string {
	own := a.certificate()
	if own == nil {
		return ""
	}
	have := cmp.Or(strings.Join(own.Subject.Organization, ", "), "no role")
	return fmt.Sprintf(" (the certificate of %s is %q and has %s)", a.contextLabel(), own.Subject.CommonName, have)
}

// stamp formats a local time.
func stamp(t time.Time) string { return t.Local().Format("2006-01-02 15:04:05 MST") }
